"""What a treatment saves, as a trial proves it."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.measured_savings import on_the_way, with_measured_savings
from fp8doctor.diagnosis.prescription import as_timed, prescribe
from fp8doctor.finding import Finding, Outcome, Saving, Treatment
from tests.checks.arms import ran, too_late
from tests.diagnosis.trials import LOSING, SLOW, Of, around, explored, without_fp8


def test_a_treatment_that_was_timed_alone_has_a_measured_saving() -> None:
    step = diagnose(Of(SLOW).facts()).prescription[0]
    assert step.code == "CMP001"
    assert step.saving_ms is not None
    assert (step.saving_ms.basis, step.saving_ms.gpu) == ("measured", "NVIDIA H200")
    assert step.saving_ms.low <= 277.8 <= step.saving_ms.high


def test_a_treatment_that_saves_nothing_is_refuted_and_keeps_its_cost() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(400.0)}).facts())
    outcome = next(each for each in report.outcomes if each.code == "CMP001")
    finding = next(each for each in report.findings if each.code == "CMP001")
    assert outcome.outcome == "refuted"
    assert finding.saving_ms is not None
    assert finding.saving_ms.high < 0
    assert finding.severity == "info"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


@pytest.mark.parametrize(
    ("alike_ms", "saves_ms", "outcome"),
    [(80.0, 12.7, "sick"), (99.0, -6.3, "refuted"), (None, None, "sick")],
    ids=["gains in BF16", "costs in BF16", "not timed in BF16"],
)
def test_a_fix_is_judged_where_it_would_be_used(
    alike_ms: float | None, saves_ms: float | None, outcome: str
) -> None:
    """Uncompiled FP8, which waits for the host, gains nothing; the plan is compiled BF16."""
    name = "attention-sdpa"
    facts = Of({**SLOW, "prescribed": around(110.0)}, bases={"prescribed": "as_is"}).facts()
    arms = (
        ran(name, 370.0, treatments=(name,), base="as_is"),
        ran("bf16_prescribed", alike_ms, treatments=(name,), base="bf16_compiled")
        if alike_ms
        else too_late("bf16_prescribed", name),
    )
    trial = msgspec.structs.replace(facts.trial, arms=(*facts.trial.arms, *arms))
    view = trial_view(msgspec.structs.replace(facts, trial=trial))
    treatment = Treatment(name=name, summary="s", code="c")
    finding = Finding(title="t", explanation="e", severity="warning", code="MEM006", treatment=treatment)
    asked = Outcome(code="MEM006", outcome="sick")
    ((weighed,), (judged,)) = with_measured_savings(view, (finding,), (asked,))
    saved = weighed.saving_ms and round(weighed.saving_ms.middle, 1)
    assert (saved, judged.outcome) == (saves_ms, outcome)
    plan = [step.treatment.name for step in as_timed(prescribe((weighed,)), view)]
    assert plan == ["stay-in-bf16", *([name] if outcome == "sick" else [])]


@pytest.mark.parametrize("prescribed", [94.0, 400.0])
def test_a_cpu_neither_refutes_a_treatment_nor_says_what_it_saves(prescribed: float) -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(prescribed)}, device="cpu").facts())
    (step,) = report.prescription
    assert (step.code, step.saving_ms and step.saving_ms.basis) == ("CMP001", "modelled")


def test_several_treatments_together_prove_none_of_them_alone() -> None:
    step = diagnose(Of(SLOW, treatments=("stop-checkpointing", "compile-blocks")).facts()).prescription[0]
    assert step.saving_ms is not None
    assert step.saving_ms.basis == "modelled"


def test_a_treatment_is_weighed_on_top_of_its_base() -> None:
    findings = (
        Finding(
            title="t",
            explanation="e",
            code="SHP005",
            treatment=Treatment(name="recipe-rowwise", summary="s", code="c"),
        ),
    )
    ((weighed,), _) = with_measured_savings(trial_view(explored()), findings, ())
    assert weighed.saving_ms is not None
    assert round(weighed.saving_ms.middle, 1) == 8.3
    own = msgspec.structs.replace(findings[0], saving_ms=Saving(low=1.0, high=2.0, basis="measured"))
    assert with_measured_savings(trial_view(explored()), (own,), ())[0] == (own,)


@pytest.mark.parametrize(("prescribed", "saved"), [(100.0, 7.3), (88.3, -4.4)])
def test_staying_in_bf16_is_weighed_by_the_best_of_both(prescribed: float, saved: float) -> None:
    saving = with_measured_savings(
        trial_view(Of({**SLOW, "prescribed": around(prescribed)}).facts()), (LOSING,), ()
    )[0][0].saving_ms
    assert saving is not None
    assert round(saving.middle, 1) == saved


def test_staying_in_bf16_saves_nothing_of_a_model_without_fp8() -> None:
    arms: dict[str, tuple[float, ...] | str] = {
        "as_is": around(103.6),
        "bf16_compiled": around(92.7),
        "float8_tensorwise": around(99.0),
    }
    assert with_measured_savings(trial_view(Of(arms).facts(without_fp8())), (LOSING,), ())[0] == (LOSING,)


PROPOSED = tuple(
    Step(code=code, mends=(code,), title="t", treatment=Treatment(name=name, summary="s", code="c"))
    for code, name in (("AAA001", "cache-off"), ("BBB001", "adapters-to-bf16"))
)
BOTH = ("cache-off", "adapters-to-bf16")


@pytest.mark.parametrize(
    ("alone", "savings"),
    [
        ({"cache-off": 300.0}, [("cache-off", 66.1, ()), ("adapters-to-bf16", 220.0, ())]),
        ({"adapters-to-bf16": 200.0}, [("adapters-to-bf16", 166.1, ()), ("cache-off", 120.0, ())]),
        (
            {"cache-off": 200.0, "adapters-to-bf16": 150.0},
            [("adapters-to-bf16", 216.1, ()), ("cache-off", 70.0, ())],
        ),
    ],
)
def test_a_fix_saves_what_it_adds_to_those_before_it(
    alone: dict[str, float], savings: list[tuple[str, float, tuple[str, ...]]]
) -> None:
    assert on_the_way_to(80.0, alone) == savings


@pytest.mark.parametrize("alone", [{}, {"cache-off": 366.1}, {"cache-off": 366.2, "adapters-to-bf16": 366.1}])
def test_fixes_that_gain_only_together_have_one_saving(alone: dict[str, float]) -> None:
    first, second = on_the_way_to(80.0, alone)
    assert first == ("cache-off", 286.1, ("adapters-to-bf16",))
    assert second == ("adapters-to-bf16", None, ("cache-off",))


def test_a_plan_ends_in_one_fix_if_another_adds_nothing_to_it() -> None:
    first, second = on_the_way_to(80.0, {"cache-off": 79.0})
    assert first == ("cache-off", 287.1, ())
    assert second == ("adapters-to-bf16", None, ())


def on_the_way_to(end: float, alone: dict[str, float]) -> list[tuple[str, float | None, tuple[str, ...]]]:
    """The savings of a plan of two fixes, of which some were timed alone."""
    arms = {**SLOW, "prescribed": around(end), **{name: around(ms) for name, ms in alone.items()}}
    facts = Of(arms, treatments=BOTH, bases=dict.fromkeys(alone, "as_is")).facts()
    steps = on_the_way(trial_view(facts), PROPOSED, frozenset())
    return [
        (step.treatment.name, round(step.saving_ms.middle, 1) if step.saving_ms else None, step.together)
        for step in steps
    ]


def test_breakage_stays_first_whatever_the_others_save() -> None:
    arms = {**SLOW, "prescribed": around(80.0), "adapters-to-bf16": around(200.0)}
    facts = Of(arms, treatments=BOTH, bases={"adapters-to-bf16": "as_is"}).facts()
    steps = on_the_way(trial_view(facts), PROPOSED, frozenset({"AAA001"}))
    assert [step.code for step in steps] == ["AAA001", "BBB001"]


def test_a_fix_that_is_no_part_of_the_way_keeps_only_an_estimate() -> None:
    modelled = Saving(low=1.0, high=2.0, basis="modelled")
    treatment = Treatment(name="larger-batch", summary="c", code="c")
    other = Step(code="", mends=(), title="c", treatment=treatment, saving_ms=modelled)
    facts = Of({**SLOW, "prescribed": around(80.0)}, treatments=BOTH).facts()
    assert on_the_way(trial_view(facts), [*PROPOSED, other], frozenset())[2].saving_ms == modelled
