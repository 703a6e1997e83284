"""Where the step goes: real trials on a CPU, profiled, and every way in which a profile may fail."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.loading.job import Job
from fp8doctor.profiling.profiled_step import ProfiledStep
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.depth import WHOLE, Plan, Stack
from fp8doctor.trial.copies.step import Variant, VariantPlan
from fp8doctor.trial.measure import evidence
from fp8doctor.trial.measure import results as trace
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.budget import Budget, TrialRun
from fp8doctor.trial.measure.evidence import ANOTHER_PROFILER, StepProof, why_not_profiled
from fp8doctor.trial.measure.results import _self_check, breakdown
from tests.trial.conducted import conduct
from tests.trial.decoder import AS_IS, BF16, CPU, job

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(
    monkeypatch: pytest.MonkeyPatch, one_round: None, one_thread: None, tmp_path: Path
) -> Iterator[Path]:
    """Cuts to one and two blocks, and a folder for temporary files in which nothing may be left."""
    monkeypatch.setattr(depth, "LEAST_WORTH_CUTTING", 4)
    monkeypatch.setattr(depth, "DEPTHS", ((1, 2),))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    level = os.environ.get("KINETO_LOG_LEVEL")
    yield scratch
    assert list(scratch.iterdir()) == []
    assert why_not_profiled() != ANOTHER_PROFILER
    assert os.environ.get("KINETO_LOG_LEVEL") == level


def compiled_blocks(variant: Variant) -> Variant:
    for block in variant.model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager")
    return variant


GEMMS = 2 * 2 * 3
"""FP8 matmuls of a step: two Linears in each of two blocks, forward and backward."""
COMPILED = VariantPlan("prescribed", compiled_blocks, ("compile-blocks",), True, "as_is", compiled=True)


def trial(of: Job, *arms: VariantPlan) -> Trial:
    return conduct(of, ["blocks"], arms, TrialRun(CPU, Budget(60)))


@pytest.mark.parametrize("blocks", [2, 26], ids=["whole", "two depths"])
def test_parts_and_idle_time_add_up_to_the_step(blocks: int) -> None:
    of = trial(job(blocks=blocks), AS_IS, BF16, COMPILED)
    for arm in of.arms:
        parts = arm.breakdown
        assert parts is not None
        assert arm.step_ms == pytest.approx(sum(parts.families_ms.values()) + parts.idle_ms)
        assert sum(parts.families_ms.values()) * parts.scale == pytest.approx(parts.busy_ms)
        assert parts.idle_ms >= 0
    assert "trial.arms.breakdown" not in of.gaps


# Which arms


def explained(of: Trial) -> set[str]:
    return {arm.name for arm in of.arms if recorded(arm, "breakdown") and arm.breakdown is not None}


def test_a_refused_baseline_gives_its_place_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trace, "full_ms", lambda plan, samples, arm: [1.0 if arm.name == "bf16_compiled" else 2.0] * 6
    )
    of = trial(job(blocks=2), AS_IS, BF16, replace(BF16, name="bf16_compiled", compiled=True))
    assert of.arms[-1].reason == "nothing in it was compiled"
    assert explained(of) == {"as_is", "bf16"}


def test_the_self_check_of_fp8_is_not_explained_in_place_of_a_variant() -> None:
    """Without an eager BF16 it is the step as it is, and a whole model has one depth."""
    named = [AS_IS, replace(AS_IS, name="bf16_again"), replace(AS_IS, name="prescribed")]
    attempts = [Attempt(replace(each, fp8=True)) for each in named]
    samples = {(each.name, 0): [ms] * 5 for each, ms in zip(named, (3.0, 1.0, 2.0), strict=True)}
    bench: Any = SimpleNamespace(plan=WHOLE, samples=samples, timed=attempts)
    assert [each.plan.name for each in trace.compared(bench)] == ["as_is", "prescribed"]


def test_a_step_proves_its_matmuls_its_graphs_and_what_is_outside_of_them() -> None:
    of = job(blocks=2)
    compiled_blocks(Variant(of.model, None))

    def step() -> None:
        of.model(of.batch).float().sum().backward()

    step()
    assert evidence.proof_of(step, CPU) == StepProof(GEMMS, graphs_run=2)


# What fails


def fails(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("planted")


def test_a_failure_costs_the_breakdown_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "profiled", fails)
    of = trial(job(blocks=2), AS_IS, BF16)
    assert of.gaps["trial.arms.breakdown"] == "profiling a step fails with RuntimeError: planted"
    assert explained(of) == set()
    assert {arm.name: (arm.tried, arm.fp8_gemms, arm.graphs_run) for arm in of.arms} == {
        "as_is": (True, GEMMS, 0),
        "bf16": (True, 0, 0),
    }


def test_the_users_profiler_goes_on() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as users:
        torch.ones(3).cumsum(0)
        of = trial(job(blocks=2), AS_IS, BF16, COMPILED)
        torch.ones(3).cumprod(0)
    raw: Any = users.profiler
    assert {"aten::cumsum", "aten::cumprod"} <= {event.name() for event in raw.kineto_results.events()}
    assert of.gaps["trial.arms.breakdown"] == ANOTHER_PROFILER
    assert {arm.name: arm.why for arm in of.arms} == {
        "as_is": Reason.FP8_UNSEEN,
        "bf16": None,
        "prescribed": Reason.FP8_UNSEEN,
    }


def test_a_step_that_raises_while_it_is_proven_is_no_failure_of_the_profiler() -> None:
    """Else a GPU that is lost there would go unnoticed, and every FP8 after it would be called unseen."""

    def broken() -> None:
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError):
        evidence.proof_of(broken, CPU)


# From the cuts to full depth

PLAN = Plan((Stack("blocks", 26, 0, 1),), ({"blocks": 4}, {"blocks": 12}))


def at(busy_ms: float, kernels: int = 10, **families_ms: float) -> ProfiledStep:
    return ProfiledStep(families_ms, busy_ms, None, kernels, ())  # type: ignore[arg-type]


def test_every_family_is_on_the_line_of_the_step() -> None:
    shallow = at(10.0, 100, cast=4.0, gemm_fp8=5.0, unknown=1.0)
    deepest = at(26.0, 260, cast=12.0, gemm_fp8=13.0, unknown=1.0)
    told = breakdown(PLAN, [shallow, deepest], 60.0)
    assert told.families_ms == pytest.approx({"cast": 26.0, "gemm_fp8": 27.0, "unknown": 1.0})
    found = (told.busy_ms, told.idle_ms, told.scale, told.kernels, told.reliable)
    assert found == (54.0, 6.0, 1.0, 540, True)
    assert told.unclassified_pct == pytest.approx(100 / 54)


@pytest.mark.parametrize(("waited_ms", "communication_ms", "scale"), [(20.0, 10.0, 1.0), (4.0, 0.0, 1.1)])
def test_waiting_for_other_ranks_beyond_the_step_makes_nothing_else_shorter(
    waited_ms: float, communication_ms: float, scale: float
) -> None:
    step = at(50.0 * scale + waited_ms, cast=50.0 * scale, communication=waited_ms)
    told = breakdown(WHOLE, [step], 50.0 + communication_ms)
    assert told.families_ms == pytest.approx({"cast": 50.0, "communication": communication_ms})
    assert (told.scale, told.idle_ms) == pytest.approx((scale, 0.0))


@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 3), min_size=2, max_size=2), st.floats(1e-3, 1e5))
def test_parts_always_add_up(cuts: list[tuple[float, ...]], step_ms: float) -> None:
    told = breakdown(
        PLAN, [at(sum(parts), cast=parts[0], copy=parts[1], norm=parts[2]) for parts in cuts], step_ms
    )
    assert sum(told.families_ms.values()) + told.idle_ms == pytest.approx(step_ms)
    assert told.idle_ms >= 0
    assert all(part >= 0 for part in told.families_ms.values())


@pytest.mark.parametrize(
    ("copied", "timed", "ratio"),
    [
        (BF16, ("as_is", "bf16"), 1.0),
        (BF16, ("as_is",), None),  # it raised in the window
        (AS_IS, ("as_is",), 1.0),
        (AS_IS, ("as_is", "bf16"), 1.0),
    ],
)
def test_a_copy_is_held_to_what_it_is_a_copy_of(
    copied: VariantPlan, timed: tuple[str, ...], ratio: float | None
) -> None:
    times = {"as_is": [20.0] * 9, "bf16": [10.0] * 9}
    attempts = [Attempt(AS_IS), Attempt(BF16), Attempt(replace(copied, name="bf16_again", base=copied.name))]
    samples = {("bf16_again", 0): times[copied.name], **{(name, 0): times[name] for name in timed}}
    assert _self_check(attempts, samples) == ratio
