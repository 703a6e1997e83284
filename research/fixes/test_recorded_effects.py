"""What fixes did on an H100, as `research.fixes.record` recorded it, and whether they still read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Facts, Training
from research.fixes.scripts import EXPLORED, ON_A_GPU
from research.fixes.test_effects import printed_for
from tests.recordings import text_of

FOLDER = Path(__file__).parent / "on_h100"
ROWS = json.loads(text_of(FOLDER / "h100.json.gz"))["rows"]

APPLIED = [
    pytest.param(row, fix, id=f"{row['script']}, {row['wrapped']}, {fix['name']}")
    for row in ROWS
    for fix in row["fixes"]
    if "effect" in fix
]
OF_TE = Facts(training=Training(accelerate=None, optimizer="torch.optim.adamw.AdamW"))


def test_every_script_was_recorded() -> None:
    assert {row["script"] for row in ROWS} == set(ON_A_GPU)
    assert not any("raised" in row for row in ROWS)
    names = {fix["name"] for row in ROWS for fix in row["fixes"] if "effect" in fix}
    assert {name for names in EXPLORED.values() for name in names} <= names


@pytest.mark.parametrize(("row", "fix"), APPLIED)
def test_it_did_what_it_says_on_a_gpu(row: dict[str, Any], fix: dict[str, Any]) -> None:
    first, last = fix["effect"]["losses"]
    assert fix["defects"] == []
    assert last < 0.9 * first
    assert fix["effect"]["frozen"] == row["frozen"]
    assert not {*fix["for"]} & {*ON_A_GPU[row["script"]].codes} & {*fix["effect"]["codes"]}


@pytest.mark.parametrize("name", ["te-autocast", *EXPLORED["te in fp8"]])
def test_transformer_engine_gets_the_lines_that_were_applied(name: str) -> None:
    applied = {fix["code"] for row in ROWS for fix in row["fixes"] if fix["name"] == name}
    printed = describe(name, OF_TE)
    assert printed is not None
    assert statements(printed.code) in map(statements, applied)


def statements(code: str) -> list[str]:
    """List the lines without comments, whose words are free."""
    return [line for each in code.splitlines() if (line := each.partition("#")[0].rstrip())]


TODAY = '.replace("_orig_mod.", "")'
"""What a filter of a compiled model has gained since. The recorded scripts convert before they compile, so it
changes no name there."""

OF_TORCHAO = {
    f"{row['script']}, {row['wrapped']}": row for row in ROWS if not row["script"].startswith("te ")
}


@pytest.mark.parametrize("row", OF_TORCHAO.values(), ids=OF_TORCHAO)
def test_torchao_gets_the_lines_that_were_applied(row: dict[str, Any]) -> None:
    today = {fix["name"]: fix["code"] for fix in printed_for(row["script"], row["wrapped"])["fixes"]}
    about = {*ON_A_GPU[row["script"]].codes}
    for fix in row["fixes"]:
        by_block = fix["name"] == STAY_IN_BF16  # as compile-blocks does; whole when it was recorded
        if "effect" in fix and about & {*fix["for"]} and not by_block:
            assert statements(today[fix["name"]].replace(TODAY, "")) == statements(fix["code"])
