"""NaN or infinity in FP8 only

Looks at: loss and gradients in the first steps of the job as it is and of what is prescribed,
beside BF16 on the same weights and the same batch. Every FP8 layer is also looked at alone, fed
with what it is fed in BF16.

Why it matters. One NaN in a gradient is in every weight after the next update, and no later step
takes it out again. FP8 has less range than BF16: a value beyond 448 in E4M3 becomes NaN where the
cast does not saturate, beyond 57344 in E5M2 infinity. Delayed scaling meets such values whenever
a tensor grows faster than its history, a miscompiled cast writes them by itself.

What to do. Leave the layers that overflow in BF16, or take a recipe that scales by the values of
this very step:

    recipe = DelayedScaling(amax_history_len=16)     # before: last steps' scale, today's values
    recipe = Float8CurrentScaling()                  # after, or DelayedScaling(margin=1)

Compiled code may saturate where the same cast in eager code does not: a layer that overflows alone,
run eagerly, in steps that were finite is a warning.

A lower learning rate and clipping help where gradients grow, in BF16 too; when BF16 is not finite
either, compiled or not, this check says nothing, because FP8 need not be the cause.

Evidence: torch 2.11 and older cast 1000 to NaN in E4M3 (2.12 and newer to 448), which is why
torchao clamps before (`to_fp8_saturated`); torch 2.13 still casts 1e9 to infinity in E5M2.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_utils.py
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html
https://github.com/triton-lang/triton/issues/11111
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, uses_fp8
from fp8doctor.diagnosis.treatments import describe, keep_in_bf16
from fp8doctor.facts import Arm, Facts, LayerNumerics, Linear, Network, Trial, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

NAMED = 3
"""Layers that the text names; the evidence has them all."""


@check("NUM001", "non-finite", area="numerics", severity="error", explained_by=("NUM003",))
def non_finite(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    seen = [
        each
        for name in (ArmName.AS_IS, ArmName.PRESCRIBED)
        if (each := arm(facts.trial, name)) and each.non_finite is not None
    ]
    bf16 = [
        each for name in BF16_BASELINES if (each := arm(facts.trial, name)) and each.non_finite is not None
    ]
    if not seen or not bf16:
        return NotApplicable(reason=f"no step in {'BF16' if seen else 'FP8'} could be looked at")
    sick_bf16 = [each for each in bf16 if each.non_finite]
    if sick_bf16:
        told = " and ".join(f"{' and '.join(each.non_finite or ())} in {each.name}" for each in sick_bf16)
        return NotApplicable(reason=f"loss or gradients are not finite in BF16 either: {told}")
    sick = [each for each in seen if each.non_finite]
    layers = (
        tuple(each.name for each in facts.trial.numerics if each.non_finite)
        if recorded(facts, "trial.numerics")
        else ()
    )
    if not sick and not layers:
        return None
    what = " and ".join(dict.fromkeys(name for each in sick for name in each.non_finite or ()))
    step = (
        "FP8"
        if not sick or sick[0].name == ArmName.AS_IS
        else "the prescribed FP8 step, not in the step as it is"
    )
    alone = (
        f"{plural(len(layers), 'FP8 layer')} {verb(layers)} NaN or infinity when "
        f"{'it runs' if len(layers) == 1 else 'they run'} alone, eagerly"
    )
    return Finding(
        severity="error" if sick else "warning",
        title=f"NaN or infinity in {what} in {step}" if sick else f"{alone}; the steps that ran were finite",
        explanation=f"On the same weights and the same batch BF16 is finite.{mended(sick, seen)} "
        f"{where(facts, layers)}",
        evidence={
            "non_finite": tuple(dict.fromkeys(name for each in sick for name in each.non_finite or ())),
            "arms": tuple(each.name for each in sick),
            "finite_arms": tuple(each.name for each in (*seen, *bf16) if not each.non_finite),
            "layers": layers,
        },
        treatment=treatment(facts, layers, sick),
    )


def mended(sick: list[Arm], seen: list[Arm]) -> str:
    """Say where the prescription was finite. Compiled code may saturate where eager code does not."""
    return (
        " The prescribed step was finite."
        if [each.name for each in sick] == [ArmName.AS_IS] and len(seen) > 1
        else ""
    )


def verb(layers: tuple[str, ...]) -> str:
    """Say what one layer, or several, do to such a value."""
    return "gives" if len(layers) == 1 else "give"


def where(facts: Facts, layers: tuple[str, ...]) -> str:
    """Name the layers it comes from, as far as that is known."""
    if layers:
        more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        return f"Fed alone with the input of BF16, {', '.join(layers[:NAMED])}{more} {verb(layers)} it."
    if recorded(facts, "trial.numerics") and facts.trial.numerics:
        return (
            f"None of {plural(len(facts.trial.numerics), 'layer')} that were fed alone, eagerly, gives any: "
            "it comes from compiled code, or builds up."
        )
    return "The layers were not looked at one by one, so where it begins is not known."


def treatment(facts: Facts, layers: tuple[str, ...], sick: list[Arm]) -> Treatment | None:
    """Propose BF16 for the layers it begins in, else current scaling for Transformer Engine that scales by
    the past.

    None when nothing is known.
    """
    if layers:
        return keep_in_bf16(layers, facts)
    delayed = any(
        stack_of(linear).under_autocast and linear.use == "training" for linear in facts.network.linears
    )
    if not delayed or not any(each.name == ArmName.AS_IS for each in sick):
        return None
    return describe("te-current", facts)


def _overflow(*non_finite: str) -> Facts:
    """A step of two layers, the second of which overflows in FP8."""
    linears = tuple(
        Linear(name=name, stack="torchao", use="training", recipe="tensorwise") for name in ("up", "down")
    )
    arms = tuple(
        Arm(name=name, tried=True, non_finite=found)
        for name, found in ((ArmName.AS_IS, non_finite), (ArmName.BF16, ()))
    )
    numerics = tuple(
        LayerNumerics(name=name, non_finite=64 if non_finite and name == "down" else 0)
        for name in ("up", "down")
    )
    return Facts(network=Network(linears=linears), trial=Trial(device="cuda", arms=arms, numerics=numerics))


SICK = _overflow("loss", "gradients")
HEALTHY = _overflow()
