"""The sentences of all recordings: few templates, each in use, and few words."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.analysis.step_difference import SHOWN_MS
from fp8doctor.answer.sentences import TEMPLATES
from fp8doctor.render import text
from tests.looked import looked
from tests.replays import ALL, case, replayed
from tests.sentences import PAGE, counted, page
from tests.stand_ins import transformer_engine as te

MOST_TEMPLATES = 40
MOST_WORDS = 110
USUAL_WORDS = 75
MOST_NUMBERS = 12
NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d")


@pytest.mark.parametrize("path", ALL, ids=case)
def test_a_box_says_a_time_once(path: Path) -> None:
    """Causes aside, which checks name."""
    times = [
        ms
        for each in replayed(path).box.lines
        if not each.template.startswith("why.")
        for ms in re.findall(r"[\d,]+\.\d(?= ms)", each.text)
    ]
    assert len(times) == len({*times})


@pytest.mark.parametrize("path", ALL, ids=case)
def test_a_fix_that_saves_leads_to_what_it_gives(path: Path) -> None:
    found = replayed(path)
    savings = [each.saving_ms for each in found.report.answer.fixes if each.saving_ms]
    assert not savings or "Then" in {row.label for row in found.box.rows} or found.report.answer.fault
    assert all(each.basis != "modelled" or each.high >= SHOWN_MS for each in savings)


def in_nvfp4(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True, recipe=te.NVFP4BlockScaling()):
        return model(batch).float().sum()


def in_mxfp8(model: Any, batch: Any) -> Any:
    with te.autocast(enabled=True, recipe=te.MXFP8BlockScaling()):
        return model(batch).float().sum()


@pytest.mark.parametrize(("step", "recipe"), [(in_nvfp4, "nvfp4"), (in_mxfp8, "mxfp8")])
def test_a_job_is_called_by_its_format(step: Any, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it runs, too: the step's code names the recipe."""
    te.install(monkeypatch)
    with torch.device("meta"):
        model = nn.Sequential(*(te.Linear(4096, 4096, bias=False) for _ in range(8))).bfloat16()
        batch = torch.zeros(8192, 4096, dtype=torch.bfloat16)
    report = looked(model, batch, training_step=step, assume_gpu="B200")
    assert {each.recipe for each in report.facts.network.fp8} == {recipe}
    assert report.answer.low_precision == recipe.upper()
    top = text.render(report).partition("Memory")[0]
    assert recipe.upper() in top
    assert not re.search(r"\bFP8\b", top)


def words(lines: Iterator[Any]) -> int:
    return sum(len(each.text.split()) for each in lines)


def numbers(lines: Iterator[Any]) -> int:
    """Count the numbers of a box, without those of fixes and commands; 24 of 24 is one."""
    texts = (each.text for each in lines if each.template != "open.question")
    return sum(len(NUMBER.findall(re.sub(r"^\d\. |\b(\d+) of (?=\1\b)|fix \d", "", each))) for each in texts)


@pytest.mark.slow
def test_every_template_is_in_use_and_a_box_has_few_words() -> None:
    lengths = [words(replayed(path).box.lines) for path in ALL]
    used = counted()
    assert page(used) == PAGE.read_text("utf-8"), "python -m tests.refresh sentences"
    assert len(TEMPLATES) <= MOST_TEMPLATES
    assert min(used[name] for name in TEMPLATES) >= 3
    assert max(lengths) <= MOST_WORDS
    assert median(lengths) <= USUAL_WORDS
    counts = [numbers(replayed(path).box.lines) for path in ALL]
    assert sum(each <= MOST_NUMBERS for each in counts) >= 0.9 * len(ALL)
