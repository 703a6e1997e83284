"""The first screen answers five questions by itself: is FP8 slower, why, what to do, what comes then, is it
sure; on every recorded job, in a user's words, and within the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.render.drawing import FILLS, draw
from fp8doctor.render.html import view
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.terminal import columns, printable_lines
from fp8doctor.report import load_report
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER
from tests.facts_of import DECODER_468M
from tests.recordings import files
from tests.waiting import LONGEST_S

RECORDED = files(Path(__file__).parents[1] / "patients" / "recorded")
WIDTHS = (60, 80, 100, 120)


def of(patient: str) -> Screen:
    return first_screen(load_report(RECORDED[0].with_name(f"h200-{patient}.json.gz")))


def without_code(first: Screen, screen: str) -> list[str]:
    code = {line.strip() for fix in first.fixes for line in printable_lines(fix.lines)}
    return [line for line in screen.splitlines() if line.strip() not in code]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ascii", [False, True])
def test_the_widest_screen_is_a_table_in_every_width(width: int, ascii: bool) -> None:
    first = of("checkpointed_needlessly")
    screen = draw(first, width=width, colour=False, ascii=ascii)
    assert max(map(columns, without_code(first, screen))) <= width
    fill = FILLS["matmul"][ascii]
    lines = screen.splitlines()
    start = next(at for at, line in enumerate(lines, 1) if line.startswith("ms/step"))
    rows = lines[start : start + len(first.variants)]
    assert [row.split("  ")[0] for row in rows] == [each.label for each in first.variants]
    assert sum(fill * 2 in row for row in rows) == 3
    assert screen.isascii() == ascii


def test_a_ratio_is_that_of_two_times_on_the_screen() -> None:
    first = first_screen(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)))
    times = {each.label: float(each.step) for each in first.variants}
    told = {each.label: each.speed for each in first.variants}
    best = times["BF16 compiled"]
    assert told == {
        label: "1x" if label == "BF16 compiled" else f"{best / ms:.2f}x" for label, ms in times.items()
    }


@pytest.mark.slow
def test_no_number_is_parted_from_its_unit() -> None:
    first = of("gpt2_conv1d")
    for width in range(40, 121):
        screen = draw(first, width=width, colour=False, ascii=False)
        assert not re.search(r"±\s*│?$|\d\s*│\n│\s+(?:%|ms)", screen, re.MULTILINE)


@pytest.mark.slow
def test_a_screen_draws_no_random_number() -> None:
    """In a process that had not imported what draws it, as a training's."""
    ask = """
        import random
        from pathlib import Path
        from fp8doctor import load_report
        report = load_report(Path("{path}"))
        random.seed(0)
        expected = random.getstate()
        assert "fp8doctor" in str(report)
        assert random.getstate() == expected
    """
    code = textwrap.dedent(ask.format(path=RECORDED[0]))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONGEST_S)


def test_parts_that_cannot_be_relied_on_have_no_bar() -> None:
    assert FP8_EAGER.breakdown is not None
    unreliable = replace(FP8_EAGER, breakdown=replace(FP8_EAGER.breakdown, reliable=False))
    report = diagnose(timed(DECODER_468M, unreliable, BF16))
    assert [bool(each.parts) for each in first_screen(report).variants] == [True, False]
    steps = view(report).steps
    assert steps is not None
    assert [{part.kind for part in bar.segments} for bar in steps.bars] == [{"part"}, {"whole"}]
