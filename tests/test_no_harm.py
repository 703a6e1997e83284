"""No harm, and fixes that do what they say: a short form of `research/reliability` and `research/fixes`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from research.fixes.test_effects import PLANTED
from research.fixes.test_effects import test_a_planted_bad_fix_is_caught as catches
from research.fixes.test_effects import test_a_printed_fix_does_what_it_says as check_fixes
from research.reliability import command_lines, saved_reports, trees, trials

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_forgotten")
def test_looking_and_trials_change_nothing() -> None:
    assert trees.looks(20, seed=1).failures == []
    assert trials.trials(2, seed=1).failures == []


def test_damaged_reports_and_random_commands_end_as_the_contract_says(tmp_path: Path) -> None:
    assert saved_reports.deletions(tmp_path, most=1).failures == []
    assert saved_reports.damages(15, tmp_path, seed=1).failures == []
    assert command_lines.command_lines(30, tmp_path, seed=1).failures == []


@pytest.mark.parametrize(
    ("name", "how", "first"),
    [
        ("adapters converted", "compiled", True),
        ("one row a sample", "ddp(compiled)", False),
        ("accelerate in bf16", "plain", False),
        ("not prepared yet", "plain", False),
        ("mxfp8 on an H100", "compiled", True),
        ("untied", "ddp", True),
    ],
)
def test_printed_fixes_do_what_they_say(name: str, how: str, first: bool) -> None:
    check_fixes(name, how, first)


@pytest.mark.parametrize("planted", ["brings a new warning", "stops learning"])
def test_a_fix_that_cures_its_finding_and_does_harm_is_caught(planted: str) -> None:
    catches(*PLANTED[planted])
