"""The short form of the kit; `test_planted` shows each night that it can fail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.reliability import command_lines, faults, growth, saved_reports, secrets, trees, trials
from tests.reliability.__main__ import PAGE, PARTS, cells_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# What must hold


@pytest.mark.slow
@pytest.mark.gate("20")
@pytest.mark.parametrize("count", [20, 100])
@pytest.mark.usefixtures("_forgotten")
def test_looking_at_random_trees_changes_nothing(count: int) -> None:
    assert trees.looks(count, seed=1).failures == []


@pytest.mark.slow
@pytest.mark.gate("2")
@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.usefixtures("_forgotten")
def test_trials_of_hostile_steps_change_nothing(count: int) -> None:
    assert trials.trials(count, seed=1).failures == []


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.CHEAP)
def test_a_fault_costs_no_more_than_the_report(name: str, tmp_path: Path) -> None:
    assert faults.faults([name], tmp_path, seed=1).failures == []


@pytest.mark.slow
@pytest.mark.gate("1")
@pytest.mark.parametrize("times", [1, 4])
def test_damaged_reports_are_shown_or_refused(times: int, tmp_path: Path) -> None:
    assert saved_reports.deletions(tmp_path, most=times).failures == []
    assert saved_reports.damages(15 * times, tmp_path, seed=1).failures == []


@pytest.mark.slow
@pytest.mark.gate("30")
@pytest.mark.parametrize("count", [30, 120])
def test_random_command_lines_end_as_the_contract_says(count: int, tmp_path: Path) -> None:
    assert command_lines.command_lines(count, tmp_path, seed=1).failures == []


def test_every_kind_of_secret_is_scrubbed() -> None:
    count = secrets.scrubbed()
    assert (count.failures, count.tried >= 80) == ([], True)


@pytest.mark.slow
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
    from tests.reliability import __main__ as kit

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


def test_the_tests_that_hold_what_the_reviews_found_exist() -> None:
    rows = PAGE.read_text("utf-8").split("## What the reviews found")[1].split("##")[0]
    named = re.findall(r"`(tests/\S+\.py)`: ((?:`test_\w+`(?:, )?)+)", rows)
    assert len(named) > 30
    for file, tests in named:
        text = PAGE.parents[2].joinpath(file).read_text("utf-8")
        assert [each for each in re.findall(r"`(\w+)`", tests) if f"def {each}(" not in text] == []
