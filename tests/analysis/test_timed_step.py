"""Steps of two saved reports: their times, what is no step's in them, what differs that should not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fp8doctor.analysis.timed_step import cautions, timed_step, unlike
from fp8doctor.diagnosis.comparison import Comparison, compared
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Arm, Breakdown, Distributed, Facts, Observation, Package, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.unrecorded import NOT_RECORDED
from tests.facts_of import DECODER_468M


def timed(rounds: tuple[float, ...] = (100.0,) * 7, families: dict[str, float] | None = None) -> Facts:
    ms = sorted(rounds)[len(rounds) // 2]
    found = (
        Breakdown(
            families_ms=families,
            idle_ms=ms - sum(families.values()),
            busy_ms=sum(families.values()),
            scale=1.0,
            reliable=True,
        )
        if families
        else None
    )
    arm = Arm(
        name="as_is",
        tried=True,
        why=None,
        reason=None,
        step_ms=ms,
        low_ms=min(rounds),
        high_ms=max(rounds),
        rounds_ms=rounds,
        peak_gib=20.0,
        breakdown=found,
        graphs_run=0,
    )
    trial = Trial(device="cuda", gpu="NVIDIA H200", blocks={}, arms=(arm,), reliable=True, reason=None)
    return replace(DECODER_468M, trial=trial)


def of(first: Facts, second: Facts) -> Comparison:
    return compared(diagnose(first), diagnose(second), ("a.json", "b.json"))


def with_arm(facts: Facts, **changed: Any) -> Facts:
    arms = tuple(replace(arm, **changed) for arm in facts.trial.arms)
    return replace(facts, trial=replace(facts.trial, arms=arms))


def test_rates_are_those_of_the_step() -> None:
    step = timed_step(timed(), "a")
    assert (step.steps_per_s, step.tokens_per_s, step.peak_gib) == (10.0, 163840.0, 20.0)
    assert step.measured_on == "NVIDIA H200"
    twice = replace(timed(), workload=replace(DECODER_468M.workload, accumulate=2))
    assert timed_step(twice, "a").tokens_per_s == 2 * 163840.0


@pytest.mark.slow
def test_the_interval_of_the_ratio_supposes_no_common_rounds() -> None:
    """As many rounds on both sides do not make them the same rounds."""
    one, other = (99.0, 100.0, 101.0) * 3, (52.0, 50.0, 51.0, 49.0, 48.0, 50.0, 50.0, 50.0, 50.0)
    found = of(timed(one), timed(other)).speedup
    assert found is not None
    assert found.median == 2.0
    assert found.low == pytest.approx(99 / 51)
    assert found.high == pytest.approx(101 / 49)


@pytest.mark.slow
def test_the_difference_is_divided_where_both_are_profiled() -> None:
    bf16 = timed((100.0,) * 7, {"gemm_16bit": 80.0, "pointwise": 15.0})
    fp8 = timed((120.0,) * 7, {"gemm_fp8": 50.0, "cast": 55.0, "pointwise": 15.0})
    found = of(bf16, fp8)
    assert found.difference is not None
    assert found.difference.parts_ms["casts"] == 55.0
    assert found.difference.parts_ms["GEMMs"] == -30.0


@pytest.mark.slow
def test_an_old_report_without_breakdowns_is_one_that_was_not_profiled() -> None:
    bf16 = timed((100.0,) * 7, {"gemm_16bit": 80.0, "pointwise": 15.0})
    found = of(bf16, with_arm(timed(), breakdown=NOT_RECORDED))
    assert found.difference is None
    assert found.speedup is not None


@pytest.mark.parametrize(
    ("change", "caution"),
    [
        ({"why": Reason.STILL_COMPILING}, "the timing of a contained compilation"),
        ({"why": None, "reason": "it was still compiling while it was timed", "tried": False}, ""),
        (
            {"rounds_ms": (900.0, 100.0, 100.0, 100.0, 100.0)},
            "one of the 5 rounds of a took 9.0 times the median, so that a compilation may be in it",
        ),
        ({"rounds_ms": (147.0, 100.0, 100.0, 100.0, 100.0)}, ""),
    ],
)
def test_a_timing_that_held_a_compilation_is_told(change: dict[str, Any], caution: str) -> None:
    facts = with_arm(timed(), **change)
    assert list(cautions(facts, timed_step(facts, "a"))) == [caution] * bool(caution)


@pytest.mark.slow
def test_a_cpu_and_an_unreliable_trial_are_told() -> None:
    facts = timed()
    trial = replace(facts.trial, device="cpu", gpu=None, reliable=False, reason="its copy took 1.3 as long")
    facts = replace(facts, trial=trial)
    found = of(timed(), facts)
    assert found.difference is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "what"),
    [
        (replace(timed(), trial=replace(timed().trial, gpu="NVIDIA B200")), "GPU"),
        (replace(timed(), network=replace(DECODER_468M.network, parameters=5)), "model"),
        (replace(timed(), workload=replace(DECODER_468M.workload, batch_size=8)), "batch"),
        (replace(timed(), workload=replace(DECODER_468M.workload, accumulate=2)), "batch"),
        (
            replace(timed(), training=replace(DECODER_468M.training, distributed=Distributed(world_size=8))),
            "",
        ),
        (replace(timed(), software=replace(DECODER_468M.software, torch="2.13.0")), "torch"),
        (
            replace(
                timed(),
                software=replace(DECODER_468M.software, packages={"torchao": Package(version="0.17")}),
            ),
            "torchao",
        ),
        (replace(timed(), software=replace(DECODER_468M.software, packages={})), ""),
        (timed((50.0,) * 7), ""),
    ],
)
def test_what_differs_and_should_not_is_named(changed: Facts, what: str) -> None:
    """What is not known of one does not differ."""
    assert [each[0] for each in unlike(timed(), changed)] == [what] * bool(what)


def test_processes_differ_where_both_are_known() -> None:
    one, eight = (
        replace(timed(), training=replace(DECODER_468M.training, distributed=Distributed(world_size=size)))
        for size in (1, 8)
    )
    assert list(unlike(one, eight)) == [("processes", "1", "8")]


@pytest.mark.slow
def test_a_report_without_a_time_says_why() -> None:
    found = of(DECODER_468M, with_arm(timed(), tried=False, step_ms=None, reason="the GPU was lost"))
    assert found.speedup is None


def test_findings_of_one_report_alone_are_named() -> None:
    healthy = replace(timed(), network=replace(DECODER_468M.network, linears=()))
    found = of(healthy, timed())
    assert "CMP001" in found.appeared
    assert not set(found.appeared) & set(found.gone)


@pytest.mark.parametrize(("clock", "where"), [("cuda", "the GPU"), ("host", "the host's clock")])
def test_steps_of_a_watched_script_count_where_no_trial_timed_a_copy(clock: Any, where: str) -> None:
    observed = Observation(steps_ms=(110.0, 100.0, 90.0), clock=clock, compiled=2)
    facts = replace(DECODER_468M, observed=observed)
    step = timed_step(facts, "a")
    assert (step.step_ms, step.low_ms, step.high_ms) == (100.0, 90.0, 110.0)
    assert (step.tokens_per_s, step.measured_on, step.missing) == (163840.0, where, "")
    both = replace(facts, trial=timed((50.0,) * 7).trial)
    assert timed_step(both, "a").step_ms == 50.0
    assert list(cautions(both, timed_step(both, "a"))) == []
