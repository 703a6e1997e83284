"""What a treatment saves, as a trial proves it."""

from __future__ import annotations

import pytest

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.savings import on_the_way
from fp8doctor.finding import Treatment
from tests.diagnosis.trials import SLOW, Of, around


def test_a_treatment_that_saves_nothing_is_refuted_and_keeps_its_cost() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(400.0)}).facts())
    outcome = next(each for each in report.outcomes if each.code == "CMP001")
    finding = next(each for each in report.findings if each.code == "CMP001")
    assert outcome.outcome == "refuted"
    assert finding.saving_ms is not None
    assert finding.saving_ms.high < 0
    assert finding.severity == "info"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


@pytest.mark.parametrize("prescribed", [94.0, 400.0])
def test_a_cpu_neither_refutes_a_treatment_nor_says_what_it_saves(prescribed: float) -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(prescribed)}, device="cpu").facts())
    (step,) = report.prescription
    assert (step.code, step.saving_ms and step.saving_ms.basis) == ("CMP001", "modelled")


PROPOSED = tuple(
    Step(
        code=code,
        mends=(code,),
        names=(code,),
        title="t",
        treatment=Treatment(name=name, summary="s", code="c"),
    )
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


def on_the_way_to(end: float, alone: dict[str, float]) -> list[tuple[str, float | None, tuple[str, ...]]]:
    """The savings of a plan of two fixes, of which some were timed alone."""
    arms = {**SLOW, "prescribed": around(end), **{name: around(ms) for name, ms in alone.items()}}
    facts = Of(arms, treatments=BOTH, bases=dict.fromkeys(alone, "as_is")).facts()
    steps = on_the_way(TrialView(facts), PROPOSED, frozenset())
    return [
        (step.treatment.name, round(step.saving_ms.middle, 1) if step.saving_ms else None, step.together)
        for step in steps
    ]


def test_breakage_stays_first_whatever_the_others_save() -> None:
    arms = {**SLOW, "prescribed": around(80.0), "adapters-to-bf16": around(200.0)}
    facts = Of(arms, treatments=BOTH, bases={"adapters-to-bf16": "as_is"}).facts()
    steps = on_the_way(TrialView(facts), PROPOSED, frozenset({"AAA001"}))
    assert [step.code for step in steps] == ["AAA001", "BBB001"]
