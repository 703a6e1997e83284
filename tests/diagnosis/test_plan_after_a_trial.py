"""What is left of a plan once it was timed, what each fix saves, and when it ends with leaving FP8 off."""

from typing import Any

import msgspec
import pytest

from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.diagnosis.plan import make_plan
from fp8doctor.diagnosis.savings import on_the_way
from fp8doctor.facts import Facts
from fp8doctor.facts.arm_names import Reason
from fp8doctor.finding import Finding, Treatment
from tests import replays
from tests.diagnosis.trials import LOSING, SLOW, Of, around, compiled_by_block
from tests.facts_of import DECODER_468M


def test_a_fix_that_does_not_fit_is_not_prescribed_and_its_finding_says_so() -> None:
    too_large = dict.fromkeys(("prescribed", "compile-blocks"), Reason.DOES_NOT_FIT)
    facts = Of({**SLOW, **too_large}, bases={"compile-blocks": "as_is"}).facts()
    report = diagnose(facts, select=["CMP001"])
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]
    (finding,) = report.findings
    assert (finding.treatment, finding.saving_ms) == (None, None)


CACHED = msgspec.structs.replace(DECODER_468M.training, use_cache=True, cache_switch="")
LOOP = "for block in model.blocks:\n    block.compile()"
CACHE_OFF = "model.config.use_cache = False   # a KV cache slows the compiled blocks down"
WITHOUT_BLOCKS = msgspec.structs.replace(DECODER_468M.network, blocks=())


@pytest.mark.parametrize(
    ("bf16_compiled", "changes", "lines"),
    [
        (92.7, {}, [LOOP]),
        (107.0, {}, []),
        (92.7, {"training": CACHED}, [LOOP, CACHE_OFF]),
        (92.7, {"network": WITHOUT_BLOCKS}, ["model.compile()"]),
    ],
)
def test_the_plan_stays_in_the_bf16_that_was_fastest(
    bf16_compiled: float, changes: dict[str, Any], lines: list[str]
) -> None:
    arms = {**SLOW, "bf16_compiled": around(bf16_compiled), "prescribed": around(110.0)}
    facts = Of(arms, bases={}).facts(msgspec.structs.replace(DECODER_468M, **changes))
    last = diagnose(facts).prescription[-1].treatment
    assert last.code == "\n".join(["# leave out the conversion to FP8", *lines])


def test_nothing_is_compiled_if_the_step_as_it_is_was_faster() -> None:
    """Of a job that asks for FP8 and has no layer for it."""
    facts = replays.of("patients", "h200-gpt2_conv1d").report.facts
    arms = tuple(
        msgspec.structs.replace(
            each, rounds_ms=tuple(2 * ms for ms in each.rounds_ms), step_ms=2 * each.step_ms
        )
        if each.name == "bf16_compiled"
        else each
        for each in facts.trial.arms
    )
    changed = msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, arms=arms))
    plans = [diagnose(each).prescription for each in (facts, changed)]
    assert [any(".compile(" in step.treatment.code for step in plan) for plan in plans] == [True, False]


@pytest.mark.parametrize("off", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_what_switches_compilation_off_is_unset_before_a_plan_compiles(off: str) -> None:
    facts = replays.of("benchmarks", "h200-qwen3_4b_bf16").report.facts
    variables = msgspec.structs.replace(facts.environment, variables={off: "1"})
    plan = diagnose(msgspec.structs.replace(facts, environment=variables)).prescription
    compiling = [step.treatment.code for step in plan if ".compile(" in step.treatment.code]
    assert compiling
    assert all(f"unset {off}" in code for code in compiling)


@pytest.mark.parametrize("late", ["bf16_as_compiled", "bf16_compiled"])
def test_the_users_own_compile_stays_if_bf16_under_it_was_not_timed(late: str) -> None:
    """Its lines then have no measured saving, and the time of another form of BF16 is no promise."""
    arms = {**SLOW, "as_is": around(140.0), "prescribed": around(139.0), late: Reason.NO_TIME_LEFT}
    report = diagnose(Of(arms).facts(compiled_by_block(DECODER_468M)))
    last = report.prescription[-1]
    assert last.treatment.code == "# leave out the conversion to FP8\n# leave your own torch.compile as it is"
    assert last.saving_ms is None
    assert last.treatment.name == "stay-in-bf16"
    assert report.answer.compared.end is None


COMPILES = Treatment(name="compile-blocks", summary="s", code="c")
EAGER = Finding(title="t", explanation="e", code="CMP001", severity="warning", treatment=COMPILES)
EVEN_FP8 = Of({**SLOW, "prescribed": around(92.7)}, bases={"prescribed": "as_is"})


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (DECODER_468M, "compile-blocks"),
        (EVEN_FP8.facts(), "compile-blocks"),
        (Of({**SLOW, "prescribed": around(100.0)}).facts(), "stay-in-bf16"),
    ],
    ids=["no trial", "even once prescribed", "slower even as prescribed"],
)
def test_fp8_is_never_mended_and_given_up_in_one_plan_unless_that_was_measured(
    facts: Facts, name: str
) -> None:
    steps = make_plan(TrialView(facts), (LOSING, EAGER), Expected(facts, (LOSING, EAGER)))
    assert [step.treatment.name for step in steps] == [name]


def test_a_treatment_that_saves_nothing_is_refuted_and_keeps_its_cost() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(400.0)}).facts())
    outcome = next(each for each in report.outcomes if each.code == "CMP001")
    finding = next(each for each in report.findings if each.code == "CMP001")
    assert outcome.outcome == "refuted"
    assert finding.saving_ms is not None
    assert finding.saving_ms.high < 0
    assert finding.severity == "info"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


def test_a_cpu_neither_refutes_a_treatment_nor_says_what_it_saves() -> None:
    report = diagnose(Of({**SLOW, "prescribed": around(400.0)}, device="cpu").facts())
    (step,) = report.prescription
    assert (step.code, step.saving_ms and step.saving_ms.basis) == ("CMP001", "modelled")


def proposed(code: str, name: str) -> Step:
    treatment = Treatment(name=name, summary="s", code="c")
    return Step(code=code, mends=(code,), names=(code,), title="t", treatment=treatment)


PROPOSED = proposed("AAA001", "cache-off"), proposed("BBB001", "adapters-to-bf16")
CACHE, ADAPTERS = BOTH = ("cache-off", "adapters-to-bf16")


@pytest.mark.parametrize(
    ("alone", "savings"),
    [
        ({CACHE: 300.0}, [(CACHE, 66.1, ()), (ADAPTERS, 220.0, ())]),
        ({ADAPTERS: 200.0}, [(ADAPTERS, 166.1, ()), (CACHE, 120.0, ())]),
        ({CACHE: 200.0, ADAPTERS: 150.0}, [(ADAPTERS, 216.1, ()), (CACHE, 70.0, ())]),
        ({}, [(CACHE, 286.1, (ADAPTERS,)), (ADAPTERS, None, (CACHE,))]),
        ({CACHE: 366.2, ADAPTERS: 366.1}, [(CACHE, 286.1, (ADAPTERS,)), (ADAPTERS, None, (CACHE,))]),
    ],
)
def test_a_fix_saves_what_it_adds_to_those_before_it(
    alone: dict[str, float], savings: list[tuple[str, float | None, tuple[str, ...]]]
) -> None:
    """Fixes that gain only together have one saving."""
    assert on_the_way_to(80.0, alone) == savings


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
