"""What holds of the times of every report: the table of variants, the plan's end, and parts that add up."""

import pytest

from fp8doctor.analysis.arms import Variant, all_changes, changes_in_bf16
from fp8doctor.analysis.compile_coverage import own_compile
from fp8doctor.analysis.noise import SELF_CHECK_TOLERANCE, speed
from fp8doctor.analysis.own_step import compiles_any
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, STAY_IN_BF16, family, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.sentences import PARTS
from fp8doctor.answer.steps import COLUMNS
from fp8doctor.diagnosis.plan import COMPILATION
from fp8doctor.facts import Arm
from fp8doctor.facts.arm_names import (
    BASELINES,
    BF16_BASELINES,
    COMPILED_BF16,
    ArmName,
    is_conversion,
    is_in_bf16,
    is_withdrawn,
)
from fp8doctor.report import Report
from tests.replays import Replay


def hold_times(found: Replay) -> None:
    parts_add_up(found)
    a_slower_form_is_named(found)
    a_name_has_one_value(found)
    the_fastest_fp8_is_the_fastest(found.view)
    a_gain_is_the_time_now_over_the_end(found)
    assert (found.view.end is not None) == timed(found.view)
    if found.view.end:
        a_plan_arrives_where_it_says(found, found.view.end)


def timed(view: TrialView) -> bool:
    """Return whether a trial timed the step as it is and a BF16 on a GPU."""
    return view.on_gpu and view.as_is is not None and view.bf16 is not None


def a_plan_arrives_where_it_says(found: Replay, end: Variant) -> None:
    """Carried out, it takes the time that it promises; nothing that was timed is faster."""
    report, view = found.report, found.view
    names = {step.treatment.name for step in report.prescription}
    done = {name for each in view.facts.trial.arms for name in each.get("treatments", ()) if each.tried}
    assert end.arm in carried_out(names & (done | {STAY_IN_BF16}), view)
    saved = [each.saving_ms for each in report.prescription if each.saving_ms]
    whole = round(view.as_is.ms.value, 1) - round(end.arm.step_ms, 1)
    assert sum(each.middle for each in saved if each.basis == "measured") == pytest.approx(whole, abs=0.01)
    rows = {row.step for row in found.rows}
    assert {f"{each.to_ms:,.1f}" for each in saved if each.basis == "measured"} <= rows
    for each in (each for each in view.facts.trial.arms if each.tried and each.step_ms):
        if each.name in BASELINES or is_in_fp8(each):
            alike = end.is_as_is or end.in_fp8 == is_in_fp8(each)
            hidden = alike and speed(each, end.arm, view.facts.trial).low <= 1
            broken = each.get("non_finite") and view.bf16.is_finite
            assert hidden or broken or each.step_ms * (1 + SELF_CHECK_TOLERANCE) >= end.arm.step_ms, each.name


def the_fastest_fp8_is_the_fastest(view: TrialView) -> None:
    """Of those that train without NaN, if BF16 does."""
    totals = [each for each in view.facts.arms() if each.tried and each.step_ms and is_in_fp8(each)]
    if not (timed(view) and view.uses_fp8 and totals):
        return
    sound = [each for each in totals if not (view.bf16.is_finite and each.get("non_finite"))]
    fastest = min(sound, key=lambda each: each.step_ms or 0.0, default=None)
    assert (view.fp8 and view.fp8.arm) == fastest


def a_gain_is_the_time_now_over_the_end(found: Replay) -> None:
    compared = found.report.answer.compared
    if compared.gain and compared.now and compared.end:
        ratio = compared.now.ms.value / compared.end.ms.value
        assert compared.gain.value == pytest.approx(ratio, rel=0.01)


def a_slower_form_is_named(found: Replay) -> None:
    """A job that is slower than a compiled BF16, and is not compiled, has a cause beyond its parts."""
    said = found.report.answer
    now, bf16 = said.compared.now, said.compared.bf16
    if said.status == "fp8_slower" and now and bf16 and bf16.name in COMPILED_BF16:
        assert said.causes or compiles_any(found.view.facts)


def is_in_fp8(each: Arm) -> bool:
    """A total that a user could run, in its last window."""
    parts = (
        is_in_bf16(each.name)
        or is_withdrawn(each.name, *each.treatments)
        or each.name == ArmName.WITHOUT_ADAPTERS
    )
    return not parts and (each.name == ArmName.AS_IS or bool(each.get("treatments")))


def carried_out(names: set[str], view: TrialView) -> list[Arm]:
    """The variants that these treatments make of the step as it is."""
    arms = [each for each in view.facts.trial.arms if each.tried and each.step_ms]
    if STAY_IN_BF16 in names or not view.uses_fp8:
        compiles = any(traits(name).compiles for name in names)
        converts = {name for name in names if family(name) == "convert"}
        if converts:
            own = {COMPILE_BLOCKS} if own_compile(view.facts) == "blocks" else set()
            made = names | own
            return [each for each in arms if is_conversion(each.name) and made.issuperset(each.treatments)]
        rest = {name for name in names if traits(name).helps_bf16_too and family(name) != COMPILATION}
        alike = [each for each in arms if rest and changes_in_bf16(each) == rest]
        forms = BF16_BASELINES if STAY_IN_BF16 in names or compiles else BASELINES
        return alike or [each for each in arms if each.name in forms]
    return [each for each in arms if is_in_fp8(each) and {*all_changes(view.facts.trial, each)} == names]


def timed_pairs(report: Report) -> list[tuple[float, float]]:
    """The times of the verdict, best BF16 first, if a trial measured both."""
    said = report.verdict
    measured = said.basis == "measured" and said.speedup is not None
    return [(said.bf16_step_ms, said.step_ms)] if measured and said.bf16_step_ms and said.step_ms else []


def parts_add_up(found: Replay) -> None:
    compared = found.report.answer.compared
    if compared.parts_ms and compared.speedup:
        longer = compared.fp8.ms.value - compared.bf16.ms.value
        assert sum(compared.parts_ms.values()) == pytest.approx(longer, rel=0.02, abs=0.1)
    for each in found.report.facts.arms():
        profile = each.get("breakdown") if each.tried else None
        if profile and each.step_ms:
            parts = sum(profile.families_ms.values()) + profile.idle_ms
            assert parts == pytest.approx(each.step_ms, rel=0.01)
            assert profile.unclassified_pct <= 1, "a rule knows every kernel"


COLUMNS_OF = {
    "matmuls": ("FP8 matmul", "other matmul"),
    "idle GPU": ("idle",),
    "casts": ("casts",),
    "attention": ("attention",),
    "other": ("other",),
}
"""Part of the difference -> the columns of the table of parts with its name."""


def a_name_has_one_value(found: Replay) -> None:
    """A part of the difference is that of the table of parts, if it has the same name there."""
    said = found.report.answer
    profiled = {each.ms: dict(zip(COLUMNS, each.parts_ms, strict=False)) for each in found.rows}
    pair = [profiled.get(each.ms.value) for each in (said.compared.fp8, said.compared.bf16) if each]
    if said.speedup is None or said.speedup.basis != "measured" or len(pair) < 2 or not all(pair):
        return
    fp8, bf16 = pair
    for name, ms in said.parts_ms.items():
        if columns_of := COLUMNS_OF.get(PARTS.get(name, name)):
            assert ms == pytest.approx(sum(fp8[each] - bf16[each] for each in columns_of), abs=0.02), name
