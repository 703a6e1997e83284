"""The steps that an answer compares, and what they cost to compute."""

import sys
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF, STAY_IN_BF16, after
from fp8doctor.cost.matmuls import all_tokens
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.facts import NOT_RECORDED, Facts, Observation, if_recorded
from tests import replays
from tests.analysis.test_noise import rounds
from tests.checks.arms import ran, timed, too_late
from tests.checks.step.profiled import BF16, FP8_COMPILED
from tests.facts_of import DECODER_468M
from tests.replays import case


def facts_of(name: str) -> Facts:
    return replays.of("patients", f"h200-{name}").report.facts


def untimed(name: str) -> Facts:
    return replace(facts_of(name), trial=NOT_RECORDED)


@pytest.mark.slow
def test_then_is_the_estimate_of_the_fixed_job() -> None:
    """Carried out, a plan makes the job whose own estimate it promised, for as many tokens."""
    held, wrong = Counter[str](), {}
    for path in replays.JOBS:
        facts = replace(read_saved(path)[0], trial=NOT_RECORDED, observed=NOT_RECORDED)
        for job in (facts, if_recorded(in_bf16, facts)):
            report = diagnose(job) if job else None
            end = report.answer.compared.end if report else None
            if report is None or end is None or not report.prescription:
                continue
            names = [step.treatment.name for step in report.prescription]
            fixed = after(report.facts, (step.treatment for step in report.prescription))
            expects = Expected(fixed, ()).now
            then = expects and (expects.fp8_ms if end.in_fp8 else expects.bf16_ms)
            then = then and then * all_tokens(report.facts) / all_tokens(fixed)
            held.update(names)
            if then != pytest.approx(end.ms.value, rel=1e-6):
                wrong[case(path)] = (then, end.ms.value, *names)
    assert wrong == {}
    assert {"compile-blocks", "convert-tensorwise", "adapters-to-bf16", "stay-in-bf16"} <= held.keys()


def test_a_plan_that_compiles_bf16_ends_in_compiled_bf16() -> None:
    compared = diagnose(untimed("lora_plain")).answer.compared
    assert compared.end == compared.bf16 is not None


def test_a_plan_that_leaves_fp8_off_counts_each_saving_once() -> None:
    """BF16 with the plan's other fixes is compared, so the saving is of all of them."""
    facts = replays.of("benchmarks", "h200-qwen2_3b_lora_checkpointing").report.facts
    fixes = diagnose(replace(facts, trial=NOT_RECORDED)).answer.fixes
    assert [each.treatment.name for each in fixes] == [STAY_IN_BF16, CHECKPOINTING_OFF]
    assert [bool(each.saving_ms) for each in fixes] == [True, False]
    assert fixes[0].together == (CHECKPOINTING_OFF,)


@pytest.mark.parametrize("name", ["decoder_468m", "lora"])
def test_no_estimate_is_computed_again_and_again(name: str) -> None:
    for facts in (facts_of(name), untimed(name)):
        called = calls_of(facts)
        assert called["comparison"] == called["make_plan"] == called["answer"] == 1
        assert called["bound"] <= 1
        assert max(called["end"], called["table"]) <= 3
        assert called["_expected"] <= 3


def calls_of(facts: Facts) -> Counter[str]:
    called: Counter[str] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call" and "fp8doctor" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        diagnose(facts)
    finally:
        sys.setprofile(before)
    return called


def test_a_time_of_a_cpu_is_no_verdict_on_a_gpu() -> None:
    arms = (rounds(BF16, *[60.0] * 5), rounds(replace(FP8_COMPILED, name="as_is"), *[100.0] * 5))
    report = diagnose(timed(DECODER_468M, *arms, device="cpu"), select=["STP"])
    assert report.verdict.basis != "measured"
    assert report.worst() is None


@pytest.mark.parametrize(("clock", "step_ms"), [("host", None), ("cuda", 100.0)])
def test_steps_that_a_cpu_ran_are_no_time_of_a_gpu(clock: str, step_ms: float | None) -> None:
    seen = Observation(steps_ms=(100.0,) * 5, clock=clock)
    unknown = replace(DECODER_468M, workload=NOT_RECORDED)  # nothing can be estimated
    assert diagnose(replace(unknown, observed=seen), select=["STP"]).verdict.step_ms == step_ms


def test_fp8_by_block_says_nothing_against_a_graph_of_the_user_that_was_not_timed() -> None:
    """Seen on an H200: 64.9 ms by block next to 56.1 in one graph, which takes 53.0 in FP8."""
    facts = replays.of("benchmarks", "h200-llama_3b_bf16").report.facts
    arms = (ran("as_is", 56.1), ran("float8_tensorwise", 64.9), ran("bf16_compiled", 68.0))
    said = diagnose(timed(facts, *arms, too_late("float8_tensorwise_as_compiled"))).answer
    assert said.speedup is None
    assert said.open
    own = ran("float8_tensorwise_as_compiled", 53.0)
    known = diagnose(timed(facts, *arms, own)).answer
    assert (known.compared.speedup.basis, known.compared.fp8.ms.value) == ("measured", 53.0)
