"""The BF16 baseline is not the best BF16

What it finds. FP8 looks faster (or slower) than it is, because the usual BF16 baseline is not compiled or
does not compute in BF16.

Why it matters. torch.compile makes BF16 faster too, and FP8 that is not compiled is slow by itself. In one
job, compiled FP8 reached 1.14x of BF16 without compilation, but only 1.06x of compiled BF16. FP8 without
compilation against compiled BF16 says nothing about FP8. A model with fp32 parameters and no autocast
computes in fp32 or TF32, at half of BF16's matmul rate or less.

Fix. Compare like with like: compile both, and run both in BF16 except for the FP8 layers.

    loss = model_bf16(**batch).loss  # before: against compiled FP8

    for block in model_bf16.layers:  # after: compile the baseline too
        block.compile()
    loss = model_bf16(**batch).loss

When to ignore it. If you cannot compile BF16 in production.

How it is detected, and limits. The trial times BF16 both ways, and fp8doctor checks whether the two baselines
lead to different answers. If most parameters are fp32 and no autocast is on, it reports that instead. It does
not see a baseline that you measured yourself.

References. `h200-decoder_468m_compiled`. In `h200-few_tokens`, compilation alone takes BF16 from 668.2
ms/step to 369.0 ms. https://docs.pytorch.org/ao/main/workflows/training.html
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, best_bf16, ratio, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_all_without_cache
from fp8doctor.analysis.fp8_request import autocast_of
from fp8doctor.analysis.noise import is_noise
from fp8doctor.analysis.outcome import measured_speed
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16
from fp8doctor.facts import Arm, ArmName, Facts
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import in_times, percent, quotient, times


@check(
    "CMP007", "unfair-baseline", area="compilation", severity="info", changes_fp8=True, invalidates_model=True
)
def unfair_baseline(facts: Facts) -> Finding | NotApplicable | None:
    as_is, eager, best = arm(facts.trial, ArmName.AS_IS), arm(facts.trial, ArmName.BF16), best_bf16(facts)
    if as_is is None or best is None:
        return NotApplicable(reason="the trial did not time both your step and a BF16 baseline")
    fp32_pct = 100.0 * facts.network.dtypes.get("float32", 0) / max(1, sum(facts.network.dtypes.values()))
    in_fp32 = any(each.multiplies_in == "float32" for each in facts.network.linears)
    if fp32_pct > 50.0 and in_fp32 and autocast_of(facts) is None:
        disguised = AUTOCAST_BF16 not in best.treatments
        return Finding(
            title=f"Without FP8 this job is not BF16: {percent(fp32_pct)} of the parameters are fp32, and "
            "no autocast is on",
            explanation="The BF16 variant computes its matmuls in fp32 or TF32, at half of BF16's rate or "
            "less."
            if disguised
            else "Against the same job in fp32, FP8 looks better than it is. This report timed BF16 under "
            "BF16 autocast.",
            evidence={
                "fp32_parameters_pct": fp32_pct,
                "baseline_ms": best.step_ms,
                "baseline_under_autocast": not disguised,
            },
            treatment=Treatment(
                name=AUTOCAST_BF16,
                summary="compare with BF16 under autocast",
                code='with torch.autocast("cuda", torch.bfloat16):\n    loss = model(batch)',
            ),
        )
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    if facts.trial.device == "cpu":
        return NotApplicable(reason="the trial did not time BF16 both ways on a GPU")
    if eager is None or eager.name == best.name or is_noise(best, as_is, facts.trial):
        return None
    speed = measured_speed(facts)
    if speed is not None and speed.bound:
        return NotApplicable(reason="the timing contradicts its own kernel times")
    eager_fp8 = all(linear.compiled is None for linear in facts.network.fp8)
    naive, fair = ratio(eager, as_is).median, ratio(best, as_is).median
    if speedup_in_words(eager, as_is) == speedup_in_words(best, as_is) and naive - fair <= EVEN:
        return None
    joint = "and" if naive < 1 else "but only" if fair > 1 else "but"
    return Finding(
        title=f"FP8 is {_compared(as_is, eager)} BF16 without compilation, {joint} {_compared(as_is, best)} "
        "the best BF16",
        explanation=f"Compilation alone gives BF16 {times(eager.step_ms, best.step_ms)}: {best.step_ms:,.1f} "
        f"instead of {eager.step_ms:,.1f} ms/step.{' This FP8 is not compiled.' if eager_fp8 else ''}",
        evidence={
            "speedup_over_eager_bf16": naive,
            "speedup_over_best_bf16": fair,
            "bf16_step_ms": eager.step_ms,
            "best_bf16_step_ms": best.step_ms,
        },
        treatment=Treatment(
            name="compile-baseline",
            summary="compile the BF16 baseline before comparing",
            code=baseline(best, facts),
        ),
    )


def _compared(timed: Arm, other: Arm) -> str:
    """Say how many times faster or slower it is than the other: ``1.22x faster than``."""
    if speedup_in_words(other, timed) == "even":
        return "about as fast as"
    speed = quotient(other.step_ms, timed.step_ms) or 1.0
    return f"{in_times(max(speed, 1 / speed))} {'faster' if speed > 1 else 'slower'} than"


def speedup_in_words(baseline: Arm, timed: Arm) -> str:
    """Write the verdict that this baseline gives."""
    speedup = ratio(baseline, timed)
    if speedup.low <= 1 <= speedup.high or abs(speedup.median - 1) < EVEN:
        return "even"
    return "slower" if speedup.median < 1 else "faster"


def baseline(best: Arm, facts: Facts) -> str:
    """Write the lines that compile the baseline like the trial's best BF16."""
    if best.name == ArmName.BF16_AS_COMPILED:
        return "# compile the BF16 model as you compile this one"
    return "\n".join(compile_all_without_cache(facts))


def _timed(bf16: float) -> Facts:
    times = {ArmName.AS_IS: 88.3, ArmName.BF16: bf16, ArmName.BF16_COMPILED: 92.7}
    arms = tuple(variant(name, ms, treatments=()) for name, ms in times.items())
    model = {"linears": (float8(),), "blocks": (), "dtypes": {"bfloat16": 1}, "autocast": None}
    return example(**model, device="cuda", arms=arms)


SICK = _timed(bf16=103.6)
HEALTHY = _timed(bf16=93.0)
