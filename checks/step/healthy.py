"""FP8 is on and it pays

Looks at: the measured step as it is against the best BF16 of the same model, eager or compiled.

Why it matters. A report should also say what works: FP8 GEMMs were seen in the step, and the step
is faster than BF16 by more than the timing's own uncertainty. Other findings may say how it gets
faster still. What FP8 can gain at most is bounded by the share of the GEMMs in the step (Amdahl):
60 % at 1.5x gives 1.25x, not 1.5x. Where the steps were profiled the report says how far that
bound, every cast for free, is away: what is left are the casts.

What to do. Keep FP8, and hold later changes to it:

    fp8doctor model.py                        # before: looked at once
    fp8doctor model.py --min-speedup 1.1      # after: a gate that fails when the gain is lost

Evidence: compiled tensorwise FP8 gives 1.06x in `h200-decoder_468m_compiled` and 1.19x in
`h200-llama_8b`; torchao reports +25 % on eight H100.
https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.outcome import ceiling, fp8_never_ran, measured_speed
from fp8doctor.facts import Arm, Facts, Linear, Network, Trial, if_recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import times


@check("STP005", "healthy", area="step", severity="info")
def healthy(facts: Facts) -> Finding | NotApplicable:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="no step was timed on a GPU")
    measured = measured_speed(facts) if facts.trial.arms else None
    if measured is None and not fp8_never_ran(facts.trial):
        return NotApplicable(reason="the step and the best BF16 were not both timed")
    if measured is not None and measured.status == "too_noisy":
        return NotApplicable(reason="the timing is too noisy to tell whether FP8 is faster than BF16")
    if measured is None or measured.status != "fp8_faster":
        return NotApplicable(reason="FP8 is not faster than BF16 here")
    step_ms, bf16_step_ms = measured.as_is.step_ms or 0.0, measured.bf16.step_ms or 0.0
    most = if_recorded(ceiling, facts)
    left = step_ms - bf16_step_ms / most.speedup if most else None
    bound = (
        f" With every cast for free it would be about {most.speedup:.2f}x ({most.basis}): "
        f"{max(0.0, left):,.1f} ms are left."
        if most and left is not None
        else ""
    )
    speedup = measured.speedup
    return Finding(
        title=f"FP8 pays: {times(bf16_step_ms, step_ms)} of the best BF16",
        explanation=f"A step takes {step_ms:,.1f} ms and {bf16_step_ms:,.1f} ms in BF16, timed in turn in "
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


def _timed(as_is: float, bf16: float) -> Facts:
    arms = tuple(
        Arm(name=name, tried=True, step_ms=ms, rounds_ms=(ms,) * 6)
        for name, ms in ((ArmName.AS_IS, as_is), (ArmName.BF16_COMPILED, bf16))
    )
    return Facts(network=Network(linears=(Linear(use="training"),)), trial=Trial(device="cuda", arms=arms))


SICK = _timed(as_is=80.0, bf16=92.7)
HEALTHY = _timed(as_is=366.1, bf16=92.7)
