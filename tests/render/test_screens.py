"""Whole screens, as files in ``golden/``.

``python -m tests.refresh screens`` writes the files again. Read the diff.
"""

import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.answer.steps import COLUMNS
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import text
from fp8doctor.render.page import Bars
from fp8doctor.render.report_page import page
from tests import replays
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER
from tests.facts_of import DECODER_468M
from tests.render.reports import EAGER_DECODER, SCREENS

GOLDEN = Path(__file__).with_name("golden")

SHOWN = [name for name in SCREENS if name != "lora"]
"""Screens with a file of their own, one of each kind."""


def hold(name: str, screen: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(screen, encoding="utf-8")
    held = path.read_text(encoding="utf-8") if path.exists() else ""
    assert screen == held, "python -m tests.refresh screens writes it again"


@pytest.mark.parametrize("name", SHOWN)
def test_text(name: str) -> None:
    hold(f"{name}.txt", text.render(SCREENS[name]))


def test_other_forms_of_a_screen() -> None:
    hold("eager_decoder.verbose.txt", text.render(EAGER_DECODER, verbose=True))
    hold("on_a_gpu.md", SCREENS["on_a_gpu"].to_markdown())


def test_colour_changes_nothing_but_colour() -> None:
    for each in SCREENS.values():
        coloured = text.render(each, colour=True, verbose=True)
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text.render(each, verbose=True)


def test_v_begins_with_the_first_screen() -> None:
    for each in SCREENS.values():
        assert text.render(each, verbose=True).startswith(text.render(each))


def bars_of(report: Document) -> Bars:
    return next(part for part in page(report).parts if isinstance(part, Bars))


def test_a_bar_is_as_long_as_its_step_and_a_ratio_that_of_two_times() -> None:
    bars = bars_of(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)))
    best = next(each for each in bars.rows if each.speed == "1x")
    for each in bars.rows:
        assert sum(ms for _, ms in bars.segments(each)) == pytest.approx(each.ms, abs=0.3)
        assert each is best or each.speed == f"{float(best.step) / float(each.step):.2f}x"


def test_parts_that_cannot_be_relied_on_have_no_bar() -> None:
    assert FP8_EAGER.breakdown is not None
    unreliable = replace(FP8_EAGER, breakdown=replace(FP8_EAGER.breakdown, reliable=False))
    bars = bars_of(diagnose(timed(DECODER_468M, unreliable, BF16)))
    assert [bool(bars.segments(each)) for each in bars.rows] == [True, False]


def test_every_family_of_kernels_has_its_column() -> None:
    from typing import get_args

    from fp8doctor.facts import Family

    assert sorted(each for column in COLUMNS.values() for each in column) == sorted(get_args(Family))


@pytest.mark.slow
@pytest.mark.parametrize("ascii", [False, True])
def test_a_screen_fits_its_width_and_parts_no_number_from_its_unit(ascii: bool) -> None:
    report = replays.of("patients", "h200-checkpointed_needlessly").report
    code = {line.strip() for step in report.prescription for line in step.treatment.code.splitlines()}
    for width in range(40, 121):
        lines = text.render(report, width=width, ascii=ascii).splitlines()
        prose = [line for line in lines if line.strip() not in code]
        assert max(map(len, prose)) <= width
        assert not re.search(r"±\s*│?$|\d\s*│\n│\s+(?:%|ms)", "\n".join(prose), re.MULTILINE)
