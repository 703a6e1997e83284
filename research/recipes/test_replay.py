"""What the page says of a handful of recipes is what this version finds, and what ships is what was judged;
all are replayed by ``python -m research.recipes.replay``."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.headings import counts, fired
from research.recipes.judged import JUDGED
from research.recipes.parts import Recipe
from research.recipes.replay import KINDS, MARK, PAGE, RECIPES, address, replayed, row
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


def test_a_missing_estimate_has_its_own_reason() -> None:
    for recipe in RECIPES:
        a_missing_estimate_has_its_own_reason(replayed(recipe).facts)


@pytest.mark.parametrize(
    "recipe", [each for each in RECIPES if each.name in HANDFUL], ids=lambda each: each.name
)
def test_the_row_is_the_recorded_one(recipe: Recipe) -> None:
    _, _, line = table(("",) * 5, [row(recipe, replayed(recipe))]).splitlines()
    assert line in FINDINGS


def test_every_recipe_is_there_once_and_pinned() -> None:
    assert len(RECIPES) == len({each.name for each in RECIPES}) >= 25
    assert all(any(address(each) in line for line in FINDINGS) for each in RECIPES)


def test_what_ships_is_what_was_judged() -> None:
    shipped = {
        (code, kind): each[kind.replace(" ", "_")]
        for code, each in counts()["checks"].items()
        for kind in KINDS
    }
    judged = Counter((code, judgment) for (_, code), (judgment, _) in JUDGED.items())
    assert {key: count for key, count in shipped.items() if count} == dict(judged)
    assert counts()["recipes"] == len(RECIPES)
    on_page = [line.split("|")[4] for line in FINDINGS if line.startswith("| [")]
    assert {kind: sum(cell.count(kind) for cell in on_page) for kind in KINDS} == {
        kind: sum(count for (_, judgment), count in judged.items() if judgment == kind) for kind in KINDS
    }
    assert not any(judgment == "false alarm" for _, judgment in judged), (
        "a false alarm is a bug: mend the check"
    )


def test_the_json_of_a_page_says_how_often_it_fired() -> None:
    assert fired("CMP001").startswith(
        "Fired on 5 of 41 public recipes (rightly: 5, false alarms: 0), and on none of 67"
    )
    assert fired("MOD001") == "Fired on none of 41 public recipes, and on none of 67 untouched models."
    data = json.loads(CliRunner().invoke(cli.main, ["explain", "MOD001", "--format", "json"]).output)
    assert data["corpus"] == fired("MOD001")
