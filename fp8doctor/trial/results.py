"""The attempts and their samples as plain facts: medians with intervals, at every cut and at full depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8doctor.facts import Arm, ArmCut, Trial
from fp8doctor.interval import interval
from fp8doctor.trial.bench import SELF_CHECK, Attempt
from fp8doctor.trial.depth import Plan, cleaned

SELF_CHECK_TOLERANCE = 0.02
"""BF16 against its own replica must come out at 1.00 within this, or the trial is called unreliable."""

Samples = dict[tuple[str, int], list[float]]
"""Step times in ms by arm and number of the cut, one per round."""


def report(plan: Plan, device: torch.device, attempts: Sequence[Attempt], samples: Samples, *, budget_s: float, elapsed_s: float) -> Trial:
    """Medians with intervals, at every cut and at full depth, as plain facts."""
    ratio = _self_check(attempts, samples)
    unreliable = ratio is not None and abs(ratio - 1) > SELF_CHECK_TOLERANCE
    return Trial(
        device=device.type,
        gpu=gpu_name(device),
        blocks={cleaned(stack.name): stack.count for stack in plan.stacks},
        arms=tuple(_arm(plan, attempt, samples) for attempt in attempts if attempt.plan.name != SELF_CHECK),
        self_check_ratio=ratio,
        reliable=not unreliable,
        reason=f"the step timed against its own copy gives {ratio:.3f} instead of 1.00" if unreliable else None,
        budget_s=budget_s,
        elapsed_s=elapsed_s,
    )


def _self_check(attempts: Sequence[Attempt], samples: Samples) -> float | None:
    """The time of an arm / that of its own replica at the first cut, round by round; None when one was not timed."""
    names = [attempt.plan.name for attempt in attempts if attempt.reason is None]
    of = next((name for name in ("bf16", "as_is") if name in names), None)
    if of is None or SELF_CHECK not in names:
        return None
    return interval([a / b for a, b in zip(samples[of, 0], samples[SELF_CHECK, 0], strict=True)]).median


def _full(plan: Plan, samples: Samples, name: str) -> list[float]:
    """The step at full depth, one figure per round, because rounds share clocks and heat."""
    return [plan.full(values) for values in zip(*(samples[name, number] for number in range(len(plan.cuts))), strict=True)]


def _arm(plan: Plan, attempt: Attempt, samples: Samples) -> Arm:
    if attempt.reason is not None or attempt.proof is None:
        return Arm(name=attempt.plan.name, treatments=attempt.plan.treatments, tried=False, reason=attempt.reason)
    full = _full(plan, samples, attempt.plan.name)
    cuts = []
    for number, (cut, ready) in enumerate(zip(plan.cuts, attempt.ready, strict=True)):
        at = interval(samples[attempt.plan.name, number])
        cuts.append(
            ArmCut(
                blocks={cleaned(name): count for name, count in cut.kept.items()},
                step_ms=at.median,
                low_ms=at.low,
                high_ms=at.high,
                peak_gib=ready.peak_gib,
                warm_up_s=ready.warm_up_s,
                graphs_compiled=ready.graphs,
                graph_breaks=ready.breaks,
            )
        )
    at = interval(full)
    peaks = [ready.peak_gib for ready in attempt.ready if ready.peak_gib is not None]
    return Arm(
        name=attempt.plan.name,
        treatments=attempt.plan.treatments,
        tried=True,
        reason=None,
        step_ms=at.median,
        low_ms=at.low,
        high_ms=at.high,
        rounds_ms=tuple(full),
        peak_gib=plan.full(peaks) if len(peaks) == len(plan.cuts) else None,
        cuts=tuple(cuts),
        fp8_gemms=attempt.proof.fp8_gemms,
        graphs_run=attempt.proof.graphs_run,
    )


def gpu_name(device: torch.device) -> str | None:
    """What CUDA calls the GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
