"""What the page says of a handful of recipes is found; ``python -m research.recipes.replay`` replays all."""

from __future__ import annotations

from collections import Counter

import pytest

from research.recipes.judged import JUDGED
from research.recipes.parts import Recipe
from research.recipes.replay import ALARMS, KINDS, MARK, PAGE, RECIPES, address, codes, replayed, row
from tests.markdown import table
from tests.test_every_recording import a_missing_estimate_has_its_own_reason

HANDFUL = (
    "torchtitan-llama3-8b-mxfp8",
    "llama-factory-llama3-8b-fp8-fsdp",
    "te-mnist",
    "bionemo-opengenome2-7b-fp8",
    "megatron-bridge-llama3-8b-h100-fp8cs",
    "torchtune-llama3.2-1b",
    "nanogpt-gpt2-xl",
)
FINDINGS = PAGE.read_text("utf-8").partition(MARK)[2].splitlines()


def test_every_alarm_is_judged_and_a_missing_estimate_has_its_own_reason() -> None:
    alarms = set[tuple[str, str]]()
    for recipe in RECIPES:
        report = replayed(recipe)
        a_missing_estimate_has_its_own_reason(report)
        alarms |= {(recipe.name, code) for code in codes(report, *ALARMS)}
    assert alarms == JUDGED.keys()


@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if each.name in HANDFUL], ids=lambda each: each.name
)
def test_the_row_is_the_recorded_one(recipe: Recipe) -> None:
    _, _, line = table(("",) * 5, [row(recipe, replayed(recipe))]).splitlines()
    assert line in FINDINGS


def test_every_recipe_is_there_once_and_pinned() -> None:
    assert len(RECIPES) == len({each.name for each in RECIPES}) >= 25
    assert all(any(address(each) in line for line in FINDINGS) for each in RECIPES)


def test_the_page_has_what_was_judged() -> None:
    judged = Counter((code, judgment) for (_, code), (judgment, _) in JUDGED.items())
    on_page = [line.split("|")[4] for line in FINDINGS if line.startswith("| [")]
    assert {kind: sum(cell.count(kind) for cell in on_page) for kind in KINDS} == {
        kind: sum(count for (_, judgment), count in judged.items() if judgment == kind) for kind in KINDS
    }
    assert not any(judgment == "false alarm" for _, judgment in judged), (
        "a false alarm is a bug: mend the check"
    )
