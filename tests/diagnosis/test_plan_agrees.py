"""Title, plan and promise of every recorded screen end in the same place, and name what they mean."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.next_step import more_time
from fp8doctor.facts import recorded
from fp8doctor.render.details import gains_nothing
from fp8doctor.render.screen import Screen, first_screen
from fp8doctor.report import Report, load_report
from fp8doctor.wording import in_ms
from tests.checks.arms import ran, too_late
from tests.recordings import files, name_of

TESTS = Path(__file__).parents[1]
ALL = [
    path for folder in ("patients", "benchmarks", "running") for path in files(TESTS / folder / "recorded")
]
EVERY = pytest.mark.parametrize("path", ALL, ids=[f"{each.parts[-3]}-{name_of(each)}" for each in ALL])


@functools.cache
def replayed(path: Path) -> tuple[Report, Screen, TrialView]:
    report = load_report(path)
    return report, first_screen(report), trial_view(report.facts)


def patient(name: str) -> tuple[Report, Screen, TrialView]:
    return replayed(TESTS / "patients" / "recorded" / f"h200-{name}.json.gz")


def benchmark(name: str) -> tuple[Report, Screen, TrialView]:
    return replayed(TESTS / "benchmarks" / "recorded" / f"{name}.json.gz")


@EVERY
def test_plan_and_promise_end_in_the_same_precision(path: Path) -> None:
    report, screen, _ = replayed(path)
    stays = any(step.treatment.name == STAY_IN_BF16 for step in report.prescription)
    then, fixes = screen.answer.then.sentence, " ".join(screen.answer.fix)
    if stays:
        assert "With FP8" not in then
        assert "FP8 runs" not in then
    if "than FP8 would be" in then or ") in BF16" in then:
        in_fp8 = recorded(report.facts, "network") and uses_fp8(report.facts)
        assert stays or not (in_fp8 or report.verdict.status == "fp8_not_engaged")
    assert not re.search("Or (stay|leave)", fixes)


SAME_END = {
    "backend_missing": ["stay-in-bf16"],
    "env_overridden": ["stay-in-bf16"],
    "converted_by_hand": ["stay-in-bf16"],
    "gpt2_conv1d": ["stay-in-bf16"],
    "setting_without_effect": ["stay-in-bf16"],
    "accelerate_eager": ["stay-in-bf16"],
    "old_versions": ["stay-in-bf16"],
    "backend_without_fp8": ["stay-in-bf16"],
    "debug_switches": ["switches-off"],
}


@pytest.mark.parametrize("name", SAME_END)
def test_fp8_that_cannot_win_is_not_switched_on(name: str) -> None:
    report, screen, _ = patient(name)
    assert [step.treatment.name for step in report.prescription] == SAME_END[name]
    assert "FP8 runs" not in screen.answer.then.sentence


def box(screen: Screen) -> str:
    """Everything that the box says."""
    said = screen.answer
    return " ".join((said.what, said.numbers, *(each for _, lines in said.rows for each in lines)))


@EVERY
def test_fixes_are_counted_as_they_are_shown(path: Path) -> None:
    _, screen, _ = replayed(path)
    count, told = len(screen.fixes), box(screen)
    assert count > 1 or "all fixes" not in f"{told} {screen.untimed} {screen.variants}"
    assert count == 1 or "this fix" not in told.lower()
    assert "The fixes" not in told or count > 1


@EVERY
def test_a_quiet_screen_is_the_box_with_all_warnings_and_errors(path: Path) -> None:
    report, screen, _ = replayed(path)
    quiet = first_screen(report, quiet=True)
    codes = {each.code for each in quiet.notices}
    assert quiet == Screen(answer=screen.answer, notices=quiet.notices)
    assert {each.mark for each in quiet.notices} <= {"bad", "warning", "unknown"}
    in_vain = {each.code for each in report.findings if gains_nothing(each)}
    told = {each.code for each in report.findings if each.severity != "info"} - in_vain
    assert codes >= told - screen.answer.causes


@EVERY
def test_a_promise_that_lacks_a_time_says_how_to_get_it(path: Path) -> None:
    report, screen, _ = replayed(path)
    then = screen.answer.then.sentence
    if "Not every FP8 variant was timed" in then or "too short" in box(screen):
        assert more_time(report.facts) in then


@EVERY
def test_the_step_as_it_is_is_called_so(path: Path) -> None:
    _, screen, view = replayed(path)
    took = re.search(r"the fastest FP8 that was timed takes ([\d,.]+ ms)", box(screen))
    assert took is None or view.as_is is None or took[1] != in_ms(view.as_is.step_ms)


@EVERY
def test_nothing_is_marked_that_the_plan_says_need_not_change(path: Path) -> None:
    _, screen, _ = replayed(path)
    fixes = screen.answer.fix
    if fixes == ("Nothing to change.",):
        assert not [each for each in screen.notices if each.mark in ("bad", "warning")]
    if screen.answer.tone == "good":
        assert not any("No fix is known" in each for each in fixes)


@EVERY
def test_an_untimed_fix_beside_timed_ones_is_marked_and_stands_last(path: Path) -> None:
    """What repairs the job stands first, whatever its speed."""
    report, screen, _ = replayed(path)
    untimed = [each.number for each in screen.fixes if "not timed" in each.aside]
    assert untimed == [
        number
        for number, each in enumerate(screen.answer.fix[: len(screen.fixes)], 1)
        if "(not timed" in each
    ]
    repairs = {each.code for each in report.findings if each.get("breaks")}
    speeds = [each.number for each in screen.fixes if each.code not in repairs]
    assert [each for each in untimed if each in speeds] == speeds[
        len(speeds) - len(set(untimed) & set(speeds)) :
    ]


@EVERY
def test_a_layer_that_a_fix_treats_has_another_only_if_that_gains_for_sure(path: Path) -> None:
    report, _, _ = replayed(path)
    layers: set[str] = set()
    for step in report.prescription:
        if layers.intersection(step.treatment.layers):
            assert step.saving_ms is not None
            assert step.saving_ms.low > 0
        layers.update(step.treatment.layers)


@EVERY
def test_an_estimated_ratio_stands_in_the_box_at_most_twice(path: Path) -> None:
    """In the title, and in what the plan gives."""
    report, screen, _ = replayed(path)
    if report.verdict.basis == "modelled":
        told = Counter(re.findall(r"\b\d\.\d\dx", box(screen)))
        assert not [ratio for ratio, count in told.items() if count > 2], told


def test_the_fastest_fp8_that_is_the_users_own_is_called_so() -> None:
    _, screen, _ = patient("rotated")
    assert screen.answer.fix[0] == (
        "Go back to BF16, compiled: your FP8 step as it is, 29.0 ms, is the fastest FP8 that was timed."
    )


def test_compiled_fp8_without_a_time_is_told_with_the_budget_that_times_it() -> None:
    _, screen, _ = benchmark("h200-t5_large")
    assert screen.answer.fix[0] == (
        "1. Go back to BF16 for now, compiled: the budget of 60 s was too short to time compiled FP8."
    )
    how = "Time more variants: fp8doctor --budget 850 t5_large.py"
    assert screen.answer.then.sentence.endswith(f" FP8 is undecided. {how}")
    assert "432 of 432 FP8 Linears are not compiled." in screen.answer.why
    assert screen.answer.limit.startswith("Upper bound: 1.11x BF16")
    _, screen, _ = benchmark("h100-t5_large")
    assert screen.answer.fix[0] == (
        "1. Go back to BF16, compiled: FP8 takes 872.0 ms as you run it, and cannot give more than 1.10x "
        "here."
    )
    assert screen.answer.then.sentence.endswith(" 7.3x faster than now.")


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (["bf16_prescribed"], "BF16 with fix 2"),
        (["bf16_prescribed", "bf16_compiled", "prescribed"], "compiled BF16 and BF16 with fix 2"),
    ],
)
def test_bf16_that_lacked_time_is_told_with_the_budget_that_times_it(late: list[str], told: str) -> None:
    """A plan that ends in another BF16 does not pass in silence over one that may be faster."""
    report, _, _ = benchmark("h100-gemma_2b_lora")
    trial = report.facts.trial
    arms = [too_late(each.name, *each.treatments) if each.name in late else each for each in trial.arms]
    shorter = replace(report.facts, trial=replace(trial, arms=tuple(arms)))
    screen = first_screen(diagnose(shorter))
    how = ". FP8 is undecided. Time more variants: " if "prescribed" in late else ": "
    how += "fp8doctor --budget 270 gemma_2b_lora.py"
    short = f" The budget of 90 s was too short to time {told}, which may be faster{how}"
    assert screen.answer.then.sentence.endswith(short)
    assert screen.answer.fix[1] == (
        "2. Give the adapters the base's dtype, before you create the optimizer (not timed: did not fit into "
        "the budget of 60 s)."
    )


def test_missing_compilation_is_named_once_if_only_the_whole_plan_lacked_time() -> None:
    report, _, _ = benchmark("h100-gemma_2b_lora")
    trial = report.facts.trial
    arms = [
        too_late(each.name, *each.treatments)
        if each.name == "prescribed"
        else ran(each.name, 130.0, treatments=each.treatments, base=each.base)
        if each.name == "compile-blocks"
        else each
        for each in trial.arms
    ]
    why = first_screen(diagnose(replace(report.facts, trial=replace(trial, arms=tuple(arms))))).answer.why
    assert [each for each in why if "not compiled" in each] == [
        "126 of 126 FP8 Linears are not compiled: 290.9 of 420.9 ms/step."
    ]
