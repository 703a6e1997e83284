"""FP8 can gain little in this model

What it finds. Even if FP8 changed only the matmuls, the step would be less than 1.1 times as fast as in BF16.

Why it matters. Attention, the optimizer, the loss over a large vocabulary, norms and idle time stay as they
are (Amdahl). If matmuls are a third of the step and run 1.8 times as fast, FP8 cannot give more than 1.17x,
and the casts reduce that. No recipe and no filter helps. Shorten the largest other part: BF16 gains as much.

Fix. Stay in BF16, or first shorten the largest part: fused attention, a fused optimizer, a fused
cross-entropy, larger batches.

    from torchao.float8 import convert_to_float8_training
    convert_to_float8_training(model)  # before: about 1.0x, and casts to look after

    model.compile()                    # after: BF16, compiled

When to ignore it. If you use FP8 for another reason than speed.

How it is detected, and limits. The trial profiles the best BF16 step, and times the matmuls in FP8 or
estimates them. The upper bound is this step with FP8 matmuls and no casts.

References. In `h200-few_tokens` the matmuls are 22% of the step and FP8 cannot give more than 1.05x.
torchao's own numbers at 8B are 10 to 25% more throughput.
https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import best_bf16, uses_fp8
from fp8doctor.analysis.outcome import ceiling
from fp8doctor.analysis.plan_end import plan_end
from fp8doctor.analysis.significance import LITTLE
from fp8doctor.analysis.step_difference import (
    IDLE,
    PARTS,
    breakdown_of,
    part_ms,
    waits_for_the_host,
    why_unknown,
)
from fp8doctor.diagnosis.leaving_fp8 import stay_in_bf16
from fp8doctor.facts import ArmName, Facts
from fp8doctor.facts.examples import example, float8, profiled
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import percent


@check("STP003", "little-to-gain", area="step", severity="info")
def little_to_gain(facts: Facts) -> Finding | NotApplicable | None:
    bf16, most = best_bf16(facts), ceiling(facts)
    if bf16 is None or facts.trial.device == "cpu":
        return NotApplicable(reason="the trial did not time BF16 on a GPU")
    step = breakdown_of(bf16)
    if step is None or most is None:
        return NotApplicable(
            reason=f"{bf16.name} {why_unknown(bf16)}"
            if step is None
            else "its matmuls' time in FP8 is unknown"
        )
    if most.speedup >= LITTLE:
        return None
    others = {part: part_ms(step, part) for part in PARTS if part != "GEMMs"} | {IDLE: step.idle_ms}
    largest = max(others, key=lambda part: others[part])
    fill = ", which more tokens per step would fill" if largest == IDLE and waits_for_the_host(bf16) else ""
    return Finding(
        title=f"FP8 cannot give more than about {most.speedup:.2f}x here: matmuls are only "
        f"{percent(most.gemms_pct)} of the step",
        explanation=f"The matmuls take {most.gemms_ms:,.1f} of {most.step_ms:,.1f} ms in the best BF16 "
        f"step. In FP8 they would take {most.fp8_gemms_ms:,.1f} ms ({most.basis}, {most.source}), casts "
        f"not counted. The largest part that FP8 does not change: {largest}, {others[largest]:,.1f} "
        f"ms{fill}.",
        evidence={
            "ceiling": most.speedup,
            "basis": most.basis,
            "rests_on": most.source,
            "gemms_ms": most.gemms_ms,
            "gemms_pct": most.gemms_pct,
            "fp8_gemms_ms": most.fp8_gemms_ms,
            "bf16_step_ms": most.step_ms,
            "largest_other": largest,
            "largest_other_ms": others[largest],
        },
        treatment=stay_in_bf16(facts)
        if uses_fp8(facts) and (end := plan_end(facts)) and end.in_bf16
        else None,
    )


def _two_steps(matmuls_ms: float, fp8_ms: float, **others_ms: float) -> Facts:
    """Compiled steps without idle time: families in ms."""
    bf16, fp8 = {"gemm_16bit": matmuls_ms}, {"gemm_fp8": fp8_ms, "cast": 4.0}
    arms = (profiled(ArmName.AS_IS, fp8 | others_ms), profiled(ArmName.BF16_COMPILED, bf16 | others_ms))
    return example(linears=(float8(),), device="cuda", arms=arms)


SICK = _two_steps(12.0, 7.0, attention=60.0, optimizer=8.0)
HEALTHY = _two_steps(62.4, 36.3, attention=11.0, optimizer=2.5)
