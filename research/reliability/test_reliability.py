"""The kit, short enough for a night; `test_planted` shows that it can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from research.reliability import command_lines, faults, growth, saved_reports, scripts, secrets, trees, trials
from research.reliability.__main__ import PAGE, PARTS, cells_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# What must hold


@pytest.mark.usefixtures("_forgotten")
def test_looking_at_random_trees_changes_nothing() -> None:
    assert trees.looks(100, seed=1).failures == []


@pytest.mark.usefixtures("_forgotten")
def test_trials_of_hostile_steps_change_nothing() -> None:
    assert trials.trials(10, seed=1).failures == []


@pytest.mark.parametrize("name", faults.CHEAP)
def test_a_fault_costs_no_more_than_the_report(name: str, tmp_path: Path) -> None:
    assert faults.faults([name], tmp_path, seed=1).failures == []


def test_damaged_reports_are_shown_or_refused(tmp_path: Path) -> None:
    assert saved_reports.deletions(tmp_path, most=4).failures == []
    assert saved_reports.damages(60, tmp_path, seed=1).failures == []


def test_random_command_lines_end_as_the_contract_says(tmp_path: Path) -> None:
    assert command_lines.command_lines(120, tmp_path, seed=1).failures == []


def test_scripts_end_as_under_python(tmp_path: Path) -> None:
    assert scripts.scripts(["says what is asked of it", "is preempted"], tmp_path).failures == []


def test_every_kind_of_secret_is_scrubbed() -> None:
    count = secrets.scrubbed()
    assert (count.failures, count.tried >= 80) == ([], True)


def test_many_inspections_do_not_grow_the_process() -> None:
    """What grows does so each time; what other tests of this process let go, or load, does not."""
    assert any(growth.growth(20, trial=False).failures == [] for _ in range(2))


def test_the_counts_that_are_written_down_are_of_every_part() -> None:
    written = [
        cells_of(line) for line in PAGE.read_text("utf-8").splitlines() if line.startswith(("| a ", "| an "))
    ]
    assert len(written) == len(PARTS)
    assert [cells[0] for cells in written if cells[3] != "0"] == []


def test_a_part_writes_its_row_in_the_place_of_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from research.reliability import __main__ as kit

    page = tmp_path / "README.md"
    page.write_text(f"before\n{kit.BEGIN}{kit.END}after\n")
    monkeypatch.setattr(kit, "PAGE", page)
    monkeypatch.setattr(kit, "commit", lambda: "0123abc")
    assert kit.main(["--minutes", "0", "secrets"]) == 0
    assert "| a kind of secret scrubbed | 0 | 0 | 0 |" in page.read_text()
    assert kit.main(["secrets"]) == 0
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [cells_of(line)[:4] for line in lines if line.startswith("| a ")] == [
        ("a kind of secret scrubbed", str(len(secrets.SECRETS)), str(len(secrets.SECRETS)), "0")
    ]
    assert json.dumps(lines).count("0123abc") == 1
