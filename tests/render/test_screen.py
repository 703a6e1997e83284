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
from fp8doctor.diagnosis.prescription import prescribe
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Saving
from fp8doctor.render.drawing import FILLS, draw
from fp8doctor.render.html import view
from fp8doctor.render.planned_fixes import plan
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.render.terminal import columns, printable_lines
from fp8doctor.report import Report, load_report
from tests.checks.arms import ran, timed
from tests.checks.step.profiled import BF16, FP8_COMPILED, FP8_EAGER
from tests.facts_of import DECODER_468M
from tests.recordings import files
from tests.waiting import LONGEST_S

RECORDED = files(Path(__file__).parents[1] / "patients" / "recorded")
WIDTHS = (60, 80, 100, 120)


def of(patient: str) -> Screen:
    return first_screen(load_report(RECORDED[0].with_name(f"h200-{patient}.json.gz")))


def watched(job: str) -> Report:
    return load_report(RECORDED[0].parents[2] / "running" / "recorded" / f"{job}.json.gz")


def without_code(first: Screen, screen: str) -> list[str]:
    code = {line.strip() for fix in first.fixes for line in printable_lines(fix.lines)}
    return [line for line in screen.splitlines() if line.strip() not in code]


def test_what_is_modelled_is_not_small_beside_the_step_of_a_cpu() -> None:
    slow = replace(FP8_EAGER, step_ms=1e6, rounds_ms=(1e6,) * 6)
    for device, folded in (("cuda", 1), ("cpu", 0)):
        report = diagnose(timed(DECODER_468M, slow, BF16, device=device))
        steps = tuple(
            replace(each, saving_ms=Saving(low=1.0, high=2.0, basis="modelled", gpu="NVIDIA H100"))
            for each in prescribe(report.findings, report.facts)
            if each.code == "CMP001"
        )
        assert len(plan(replace(report, prescription=steps))[1]) == folded


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


@pytest.mark.slow
def test_colour_says_nothing_that_the_text_does_not() -> None:
    first = of("vit")
    plain = draw(first, width=80, colour=False, ascii=False)
    coloured = draw(first, width=80, colour=True, ascii=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert coloured != plain
    fills = [fill for fill, _, _ in FILLS.values()]
    letters = [letter for _, letter, _ in FILLS.values()]
    assert len(set(fills)) == len(set(letters)) == len(FILLS)


def test_a_ratio_is_that_of_two_times_on_the_screen() -> None:
    first = first_screen(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED)))
    times = {each.label: float(each.step) for each in first.variants}
    told = {each.label: each.speed for each in first.variants}
    best = times["BF16 compiled"]
    assert told == {
        label: "1x" if label == "BF16 compiled" else f"{best / ms:.2f}x" for label, ms in times.items()
    }


def test_the_parts_of_a_difference_add_up() -> None:
    found = first_screen(diagnose(timed(DECODER_468M, FP8_EAGER, BF16, FP8_COMPILED))).difference
    assert found is not None
    assert f"{sum(each.ms for each in found.changes):,.1f} ms" in found.title


def test_a_timing_that_is_too_noisy_gives_no_ratio() -> None:
    noisy = replace(
        FP8_EAGER, step_ms=90.0, rounds_ms=(40.0, 80.0, 90.0, 100.0, 400.0), low_ms=40.0, high_ms=400.0
    )
    steady = replace(
        BF16, step_ms=100.0, rounds_ms=(60.0, 90.0, 100.0, 110.0, 300.0), low_ms=60.0, high_ms=300.0
    )
    report = diagnose(timed(DECODER_468M, noisy, steady))
    assert report.verdict.status == "too_noisy"
    first = first_screen(report)
    assert first.answer.sure.startswith("No: ")
    assert not re.search(r"\dx\b", first.answer.what + first.answer.numbers)


def test_names_of_variants_are_told_once() -> None:
    labels = [each.label for each in of("decoder_468m").variants]
    assert len(labels) == len(set(labels))
    assert ArmName.AS_IS not in labels


def test_a_fix_that_was_timed_and_saves_nothing_is_in_no_plan() -> None:
    first = of("narrow_head")
    assert first.fixes == ()
    report = load_report(RECORDED[0].with_name("h200-narrow_head.json.gz"))
    assert "SHP004" in {each.code for each in report.findings}


@pytest.mark.slow
def test_a_modelled_saving_of_a_gpu_is_not_held_to_the_step_of_a_cpu() -> None:
    as_is = ran("as_is", 200_000.0)
    there = first_screen(diagnose(timed(DECODER_468M, as_is)))
    here = first_screen(diagnose(timed(DECODER_468M, as_is, device="cpu")))
    assert "CMP001" in there.folded
    assert not here.folded
    assert [each.code for each in here.fixes] == ["CMP001"]


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("h200-fsdp2", "fp8doctor run --stop fsdp2.py ARGS..."),
        ("h200x2-ddp_torchao", "torchrun ... -m fp8doctor run --stop job.py ARGS..."),
    ],
)
def test_a_watched_script_is_not_told_to_run_as_it_just_did(job: str, command: str) -> None:
    report = watched(job)
    assert command in " ".join(first_screen(report).answer.fix)


@pytest.mark.slow
def test_no_number_is_parted_from_its_unit() -> None:
    first = of("gpt2_conv1d")
    for width in range(40, 121):
        screen = draw(first, width=width, colour=False, ascii=False)
        assert not re.search(r"±\s*│?$|\d\s*│\n│\s+(?:%|ms)", screen, re.MULTILINE)


def test_a_column_without_a_value_and_a_bar_beside_nothing_are_left_out() -> None:
    report = watched("h200x2-ddp_slow_rank")
    screen = draw(first_screen(report), width=80, colour=False, ascii=False)
    assert "speed\n" not in screen.replace("  GiB", "")
    assert FILLS["not profiled"][0] not in screen
    assert view(report).steps is None


def test_times_of_a_single_round_are_shown_whole() -> None:
    """They have no spread, and its column is gone."""
    report = diagnose(timed(DECODER_468M, ran("as_is", 878.4), ran("bf16", 241.3)))
    screen = draw(first_screen(report), width=90, colour=False, ascii=False)
    assert re.search(r"BF16 +241\.3 ", screen)


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


@pytest.mark.parametrize(
    ("patient", "basis"), [("accelerate_eager", "modelled"), ("decoder_468m", "measured")]
)
def test_an_end_is_green_where_it_was_measured(patient: str, basis: str) -> None:
    first = of(patient)
    assert (first.answer.tone, first.answer.then.basis) == ("bad", basis)
    drawn = draw(first, width=120, colour=True, ascii=False)
    line = next(each for each in drawn.splitlines() if "Then" in each)
    assert ("\x1b[32m" in line) == (basis == "measured")
