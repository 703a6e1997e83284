"""Checks are listed, and a code or an error is explained."""

import json
from collections import Counter

import pytest
from click.testing import CliRunner

from fp8doctor import cli, registry
from fp8doctor.cli.explain import headings
from tests.cli.command import TRACEBACK, fp8doctor


def test_list(grave_checks: str) -> None:
    result = fp8doctor("list")
    assert result.exit_code == 0
    assert any(line.startswith("CMP001") and "eager-float8" in line for line in result.stdout.splitlines())
    listed = json.loads(fp8doctor("list", "--format", "json").stdout)
    assert {"code", "name", "area", "severity", "title"} == set(listed[0])
    assert len(listed) == len(result.stdout.splitlines())
    assert "XYZ001" in fp8doctor("list", "--checks", grave_checks).stdout


def test_a_page_is_found_by_its_code_in_any_case_and_by_its_name() -> None:
    page = fp8doctor("explain", "CMP001").stdout
    assert page.startswith("CMP001 eager-float8 · compilation · warning\n\n")
    assert fp8doctor("explain", "cmp001").stdout == fp8doctor("explain", "eager-float8").stdout == page
    found = json.loads(fp8doctor("explain", "CMP001", "--format", "json").stdout)
    assert found["code"] == "CMP001"
    assert not Counter(found["page"].split()) - Counter(page.split())


OF_0_1 = """
CKP001 CKP002 CKP003 CMP001 CMP002 CMP003 CMP004 CMP005 CMP006 CMP007 CMP008 DST001 DST002 DST003 DST004
DST005 ENV001 ENV002 ENV003 ENV004 ENV005 ENV006 ENV007 ENV008 GPU001 GPU002 GPU003 GPU004 GPU005 LORA001
LORA002 LORA003 LORA004 MEM001 MEM002 MEM003 MEM004 MEM005 MOD001 MOD002 MOD003 MOD004 MOD005 MOD006
MOD007 MOD008 MOD009 MOD010 MOD011 MOD012 MOD013 NUM001 NUM002 NUM003 NUM004 SHP001 SHP002 SHP003 SHP004
SHP005 SHP006 SHP007 SHP008 STP001 STP002 STP003 STP004 STP005 STP006 STP007 STP008 STP009
"""
"""Every code that a check had; saved reports with most of them are recordings of this repository."""


@pytest.mark.parametrize("code", OF_0_1.split())
def test_a_code_of_the_past_is_understood(code: str) -> None:
    page = fp8doctor("explain", code).stdout
    now = registry.select(registry.discover(), [code])
    assert any(page.startswith(f"{each.code} ") for each in now) or page.startswith(f"{code} retired")
    assert not set(now) & set(registry.select(registry.discover(), ignored=[code]))


def test_several_codes_and_prefixes_are_explained() -> None:
    shapes = [each.code for each in headings() if each.code.startswith("SHP")]
    for args in (("CMP001", "SHP"), ("cmp001,SHP",), ("eager-float8", "SHP", "CMP001")):
        data = json.loads(fp8doctor("explain", *args, "--format", "json").stdout)
        assert [each["code"] for each in data["checks"]] == ["CMP001", *shapes]
        page = fp8doctor("explain", *args).stdout
        assert all(f"\n{code} " in f"\n{page}" for code in ("CMP001", *shapes))


UNKNOWN = "RuntimeError: nobody has seen this before, hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("CMP01",), "CMP001"),
        (("CMP001", "ZZZ"), ""),
        (("",), "nothing to explain"),
        ((" \n",), "nothing to explain"),
        ((UNKNOWN,), ""),
        (("TypeError: set_fp8() got an unexpected keyword load_in_fp8",), "has none of the"),
        ((UNKNOWN.split()[-1],), ""),
        (("ValueError: too many values to unpack (expected 2)",), ""),
        (("IndexError: list index out of range",), ""),
        (("KeyError: 'labels'",), ""),
        (("FileNotFoundError: [Errno 2] No such file or directory: 'data/train_8.bin'",), ""),
    ],
)
def test_what_is_not_known_shows_no_page(asked: tuple[str, ...], said: str) -> None:
    result = fp8doctor("explain", *asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())
    assert "hf_" not in result.stderr


def test_explain_takes_an_error_from_stdin_and_without_quotes() -> None:
    as_argument = fp8doctor("explain", TRACEBACK).stdout
    for words in (["explain", "-"], ["explain"]):
        assert CliRunner().invoke(cli.main, words, input=TRACEBACK).stdout == as_argument
    assert fp8doctor("explain", *TRACEBACK.split()).stdout == as_argument


def test_explain_an_error_by_its_text() -> None:
    page = fp8doctor("explain", TRACEBACK).stdout
    assert page.startswith("Expected trailing dimension of mat1 to be divisible by 16")
    assert "Cause. A size of an FP8 matmul" in page
    assert "Found by: SHP001 unaligned-dimensions. fp8doctor explain SHP001" in page
    assert "Source: torch aten/src/ATen/native/cuda/ScaledBlas.cpp" in page
    assert "hf_" not in page
    assert max(map(len, page.splitlines())) <= 100


def test_a_kind_of_message_comes_with_what_the_message_names() -> None:
    shown = fp8doctor("explain", "AssertionError: hidden size 1000 must be divisible by 16").stdout
    assert "Cause. A size is no multiple of 16" in " ".join(shown.split())
    assert "fp8doctor explain SHP001" in shown


ASKED = ("CMP001", "ENV001", "checkpointing", TRACEBACK, "CUBLAS_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize("asked", ASKED)
def test_a_page_has_the_width_that_columns_says(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (60, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = fp8doctor("explain", asked).stdout.splitlines()
        prose = [line for line in lines if not line.startswith("    ")]
        assert max(len(line) for line in prose if " " in line) <= width
        assert all(line == line.rstrip() for line in prose)
        for page in (each.page for each in registry.discover() if each.code == asked):
            assert not Counter(page.split()) - Counter(" ".join(lines).split())
            assert {line for line in page.splitlines() if line[:4] == "    " and " #" not in line} <= {*lines}


WORDS = {
    "checkpointing": "CKP001",
    "Optimizer": "STP007",
    "torch.compile": "CMP002",
    "unaligned": "SHP001",
    "all-gather": "DST001",
    "eager float8": "CMP001",
    "lora": "SHP002",
    "layers do not learn": "MOD007",
}
"""Words of titles, names and pages -> a check that has them."""


@pytest.mark.parametrize(("word", "found"), WORDS.items())
def test_explain_finds_words_of_titles_names_and_pages(word: str, found: str) -> None:
    result = fp8doctor("explain", word, "--format", "json")
    data = json.loads(result.stdout)
    assert found in [each["code"] for each in data.get("checks", [data])]
