"""What the words and options of a command line ask for, and which of them are mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.diagnosis.document import SCHEMA_VERSION, tool
from fp8doctor.facts import Facts, Target
from fp8doctor.worker import TrialRequest
from tests.cli.command import Worker, fp8doctor, process
from tests.facts_of import DECODER_468M

SIZES = {"batch": 4, "seq": 8, "layers": 2}
ORDER = TrialRequest(budget_s=20.0, device="cpu", select=("CMP", "SHP"), ignore=("CMP002",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("decoder.py:build_model", {"target": "decoder.py:build_model"}),
        ("--batch 4 --seq=8 model.py --layers 2 -q", SIZES),
        ("model.py -q --batch 4 --seq 8 --layers 2", SIZES),
        ("-q --fail-on never --batch 4 --seq 8 --layers 2 -- model.py", SIZES),
        ("model.py --no-trial", {"trial": None}),
        ("model.py --budget 20 --device cpu --select CMP,SHP --ignore CMP002", {"trial": ORDER}),
        ("-qo list model.py", {}),
        ("./list", {"target": "./list"}),
        ("-- list", {"target": "list"}),
    ],
)
def test_what_a_line_asks_of_the_worker(
    worker: Worker, words: str, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options stand before or after the target; the value of one is no command word."""
    monkeypatch.chdir(tmp_path)
    assert fp8doctor(*words.split()).exit_code == 0
    unasked = {"batch": None, "seq": None, "layers": None, "load_timeout": 600.0, "trial": TrialRequest()}
    assert worker.asked == [{"target": "model.py", **unasked, **asked}]
    assert (tmp_path / "list").exists() == ("-qo" in words)


@pytest.mark.slow
def test_options_stand_before_or_after_a_command_word(worker: Worker) -> None:
    for args in (("--format", "json", "env"), ("env", "--format", "json")):
        assert json.loads(fp8doctor(*args).stdout)["schema_version"] == SCHEMA_VERSION
    assert [asked["target"] for asked in worker.asked] == [None, None]


def test_env_examines_no_model(worker: Worker) -> None:
    worker.facts = Facts(target=Target(kind="environment"), software=DECODER_468M.software, gpus=())
    result = fp8doctor("env")
    assert worker.asked == [{"target": None, "layers": None, "batch": None, "seq": None}]
    assert result.exit_code == 0
    assert "! No GPU here" in result.stdout
    assert "fp8doctor model.py" in result.stdout
    assert "No model was examined" not in result.stdout


def test_version() -> None:
    result = fp8doctor("--version")
    assert (result.exit_code, result.stdout) == (0, f"fp8doctor {tool().version}\n")


# Mistakes are found before the worker starts


def test_nothing_at_all_is_wrong_usage() -> None:
    assert fp8doctor().exit_code == process().returncode == 2


def test_codes_are_prefixes_in_any_case(worker: Worker) -> None:
    words = "m.py --select cmp,MOD001 --select shp --ignore CMP002 --format json"
    codes = {outcome["code"] for outcome in json.loads(fp8doctor(*words.split()).stdout)["outcomes"]}
    assert {"CMP001", "MOD001"} <= codes
    assert "CMP002" not in codes
    assert {code[:3] for code in codes} == {"CMP", "MOD", "SHP"}


@pytest.mark.slow
def test_the_assumed_gpu_is_named_on_every_modelled_line(worker: Worker) -> None:
    result = fp8doctor("m.py", "--assume-gpu", "b200")
    assert "estimates for B200" in result.stdout
    assert "ms/step, estimated for B200" in " ".join(result.stdout.replace("CMP001", "").split())
