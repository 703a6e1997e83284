"""Every recorded plan, carried out, takes the time that it promises; nothing timed is faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8doctor.analysis.arms import all_changes, changes_in_bf16, fair_bf16, ratio_on_screen, timed_on_gpu
from fp8doctor.analysis.compile_coverage import compiles_each_block
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, is_noise
from fp8doctor.analysis.plan_end import gib_saved_at_no_cost, is_in_fp8
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, STAY_IN_BF16, family, traits
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.code_snippets import settings
from fp8doctor.diagnosis.giving_up import COMPILATION, changes_fp8_alone
from fp8doctor.diagnosis.outlook import outlook
from fp8doctor.facts import Arm
from fp8doctor.facts.arm_names import BASELINES, BF16_BASELINES, ArmName, is_conversion
from fp8doctor.render.screen import first_screen
from fp8doctor.report import Report, load_report
from fp8doctor.wording import in_ms
from tests.diagnosis.trials import Of
from tests.recordings import files, name_of
from tests.test_recorded import RECORDINGS


def timed(path: Path) -> tuple[Report, TrialView] | None:
    """The report of a trial that timed the step as it is and a BF16 on a GPU."""
    report = load_report(path)
    view = trial_view(report.facts)
    return (report, view) if timed_on_gpu(report.facts) and view.as_is and view.bf16 else None


ALL = (
    *RECORDINGS,
    *(
        path
        for of in ("benchmarks", "running", "sharded")
        for path in files(Path(__file__).parents[1] / of / "recorded")
    ),
)
TRIALS = {name_of(path): found for path in ALL if (found := timed(path))}


def carried_out(names: set[str], view: TrialView) -> list[Arm]:
    """The variants that these treatments make of the step as it is."""
    arms = [each for each in view.facts.trial.arms if each.tried and each.step_ms]
    if STAY_IN_BF16 in names or not view.uses_fp8:
        compiles = any(traits(name).compiles for name in names)
        converts = {name for name in names if family(name) == "convert"}
        if converts:
            own = {COMPILE_BLOCKS} if compiles_each_block(view.facts) else set()
            made = names | own
            return [each for each in arms if is_conversion(each.name) and made.issuperset(each.treatments)]
        rest = {name for name in names if traits(name).helps_bf16_too and family(name) != COMPILATION}
        alike = [each for each in arms if rest and changes_in_bf16(each.name, each.treatments) == rest]
        forms = (
            (*BF16_BASELINES, ArmName.BF16_CUDA_GRAPHS) if STAY_IN_BF16 in names or compiles else BASELINES
        )
        return alike or [each for each in arms if each.name in forms]
    return [each for each in arms if is_in_fp8(each) and {*all_changes(view.facts.trial, each)} == names]


@pytest.mark.parametrize("name", TRIALS)
def test_the_plan_arrives_where_it_says(name: str) -> None:
    report, view = TRIALS[name]
    assert view.end is not None
    done = {name for each in view.facts.trial.arms for name in each.get("treatments", ()) if each.tried}
    names = {step.treatment.name for step in report.prescription} & (done | {STAY_IN_BF16})
    assert view.end.arm in carried_out(names, view)
    if report.prescription or view.uses_fp8:
        assert in_ms(view.end.arm.step_ms) in outlook(report).sentence


@pytest.mark.parametrize("name", TRIALS)
def test_no_variant_that_was_timed_is_clearly_faster_than_the_plan(name: str) -> None:
    _, view = TRIALS[name]
    assert view.end is not None
    for each in view.facts.trial.arms:
        if each.tried and each.step_ms and (each.name in BASELINES or is_in_fp8(each)):
            faster = ratio_on_screen(view.end.arm, each)
            hidden = faster.low <= 1 or is_noise(view.end.arm, each, view.facts.trial)
            assert hidden or faster.median <= 1 + SELF_CHECK_TOLERANCE, each.name


def _set_by(code: str) -> Iterator[tuple[str, str | None]]:
    for line in code.splitlines():
        yield from settings(line).items()


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_fix_undoes_another(path: Path) -> None:
    """Two ways to compile, two recipes, a fix of FP8 beside leaving it off, or two values of a setting."""
    report = load_report(path)
    names = [step.treatment.name for step in report.prescription]
    for one, other in itertools.combinations(names, 2):
        assert family(one) != family(other), (one, other)
    for one, other in itertools.combinations(report.prescription, 2):
        said, again = (dict(_set_by(step.treatment.code)) for step in (one, other))
        assert all(again[name] == said[name] for name in said.keys() & again.keys()), (one, other)
    if STAY_IN_BF16 in names:
        others = [step for step in report.prescription if step.treatment.name != STAY_IN_BF16]
        assert not [step.treatment.name for step in others if changes_fp8_alone(step)]
        assert not {family(name) for name in names} & {"convert", "recipe", COMPILATION}


def test_a_variant_that_noise_hides_is_named_where_no_fix_is() -> None:
    """Compiled it took 278.3 ms and as it is 308.6, in rounds of 0.89 to 1.21."""
    report, view = TRIALS["h200-te_llama_7b"]
    assert view.end is not None
    assert view.end.is_as_is
    assert view.end.hidden is not None
    assert (
        first_screen(report)
        .answer.fix[0]
        .startswith("No fix is surely faster: FP8, compiled took 278.3 ms, within the noise.")
    )


@pytest.mark.parametrize(
    ("fixed", "hidden"),
    [
        ((70.0, 78.0, 79.0, 80.0, 110.0), True),
        ((78.0, 78.5, 79.0, 79.5, 80.0), False),
        ((97.0, 99.0, 99.5, 100.0, 103.0), False),
    ],
    ids=["hidden by noise", "surely faster", "no faster by two copies"],
)
def test_only_a_difference_that_noise_hides_is_told(fixed: tuple[float, ...], hidden: bool) -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": (99.0, 99.5, 100.0, 100.5, 101.0),
        "bf16_compiled": (119.0, 119.5, 120.0, 120.5, 121.0),
        "prescribed": fixed,
    }
    end = trial_view(Of(arms, bases={}).facts()).end
    assert end is not None
    assert (end.hidden is not None) == hidden


@pytest.mark.parametrize("name", TRIALS)
def test_no_screen_without_a_fix_is_silent_about_a_faster_variant(name: str) -> None:
    report, view = TRIALS[name]
    if not report.prescription and view.end and view.end.hidden and report.verdict.status != "too_noisy":
        assert "within the noise" in " ".join(first_screen(report).answer.fix)


@pytest.mark.parametrize("name", TRIALS)
def test_fixes_that_keep_fp8_end_faster_than_bf16_or_leaner(name: str) -> None:
    """Nobody carries out fixes to arrive within the noise of BF16."""
    _, view = TRIALS[name]
    end = view.end
    if view.uses_fp8 and end and end.changes and not end.in_bf16:
        bf16 = fair_bf16(view.facts, end.arm)
        if bf16 and not gib_saved_at_no_cost(bf16, end.arm, view.facts.trial):
            assert ratio_on_screen(bf16, end.arm).median >= 1 + EVEN
