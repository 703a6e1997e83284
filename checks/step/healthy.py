"""FP8 is on and it pays off

What it finds. Your step is faster in FP8 than the best BF16 of the same model, compiled or not.

Why it matters. FP8 matmuls ran, and the speedup is larger than the timing noise. Other findings may make the
step faster still. The matmuls' share of the step limits what FP8 can gain (Amdahl): 60% at 1.5x gives 1.25x,
not 1.5x. If the steps were profiled, the finding shows that upper bound; the difference is the casts.

Fix. Nothing to fix. Keep FP8, and guard the speedup against later changes.

    fp8doctor model.py                    # before: checked once

    fp8doctor model.py --min-speedup 1.1  # after: fails if the speedup is lost

When to ignore it. Always, if you only look for problems.

How it is detected, and limits. The trial times your step and BF16 in turn in one process, on a GPU. The upper
bound assumes that every FP8 cast is free.

References. Compiled tensorwise FP8 gives 1.06x in `h200-decoder_468m_compiled` and 1.19x in `h200-llama_8b`;
torchao reports 25% more throughput on eight H100. https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.outcome import ceiling, fp8_never_ran, measured_speed
from fp8doctor.facts import ArmName, Facts, if_recorded
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import times


@check("STP005", "healthy", area="step", severity="info")
def healthy(facts: Facts) -> Finding | NotApplicable:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="the trial timed no step on a GPU")
    measured = measured_speed(facts) if facts.trial.arms else None
    if measured is None and not fp8_never_ran(facts.trial):
        return NotApplicable(reason="the trial did not time both your step and the best BF16")
    if measured is not None and measured.status == "too_noisy":
        return NotApplicable(reason="the timing is too noisy to tell whether FP8 is faster than BF16")
    if measured is None or measured.status != "fp8_faster":
        return NotApplicable(reason="FP8 is not faster than BF16 here")
    step_ms, bf16_step_ms = measured.as_is.step_ms or 0.0, measured.bf16.step_ms or 0.0
    most = if_recorded(ceiling, facts)
    left = step_ms - bf16_step_ms / most.speedup if most else None
    bound = (
        f" Upper bound: about {most.speedup:.2f}x, if FP8 changed only the matmuls ({most.basis}); "
        f"{max(0.0, left):,.1f} ms are left to gain."
        if most and left is not None
        else ""
    )
    speedup = measured.speedup
    return Finding(
        title="FP8 pays off: it is faster than the best BF16"
        if measured.bound
        else f"FP8 pays off: {times(bf16_step_ms, step_ms)} of the best BF16",
        explanation=f"A step takes {step_ms:,.1f} ms, and {bf16_step_ms:,.1f} ms in BF16, timed in turn in "
        f"one process.{bound}",
        evidence={
            "step_ms": step_ms,
            "bf16_step_ms": bf16_step_ms,
            "speedup": speedup.median,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "ceiling": most.speedup if most else None,
            "left_ms": left,
        },
    )


def _timed(as_is: float) -> Facts:
    arms = (variant(ArmName.AS_IS, as_is), variant(ArmName.BF16_COMPILED, 92.7))
    return example(linears=(float8(),), device="cuda", arms=arms)


SICK = _timed(as_is=80.0)
HEALTHY = _timed(as_is=366.1)
