"""NaN or infinity in loss or gradients

What it finds. Loss or gradients of your own step are not finite, or FP8 is not while BF16 is with the same
weights and batch.

Why it matters. One NaN in a gradient is in every weight after the next update, and no later step removes it.
FP8 has less range than BF16. A value beyond 448 in E4M3 becomes NaN if the cast does not saturate; beyond
57344 in E5M2 it becomes infinity. Delayed scaling meets such values whenever a tensor grows faster than its
history. A miscompiled cast writes them by itself.

Fix. Leave the layers that overflow in BF16, or use a recipe that scales by this step's values, or
`DelayedScaling(margin=1)`. A lower learning rate and clipping help if gradients grow, in BF16 too.

    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=16)  # before: the last steps' scale

    from transformer_engine.common.recipe import Float8CurrentScaling
    recipe = Float8CurrentScaling()               # after

When to ignore it. If only a layer run alone overflows and all steps were finite: compiled code may saturate
where other code does not. It is then a warning.

How it is detected, and limits. `fp8doctor run` watches the loss of every step. The trial looks at loss and
gradients in the first steps of your job, of the fixed step and of BF16. It feeds every FP8 layer alone with
its BF16 input. If BF16 is not finite either, FP8 is not the cause; with a random batch that is a warning.

References. torch 2.11 and older cast 1000 to NaN in E4M3 (2.12 and newer to 448), so torchao clamps first
(`to_fp8_saturated`); torch 2.13 casts 1e9 to infinity in E5M2.
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_utils.py
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html
https://github.com/triton-lang/triton/issues/11111 https://github.com/pytorch/pytorch/issues/150859
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm, uses_fp8
from fp8doctor.analysis.finite_steps import FiniteSteps, finite_steps
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.diagnosis.treatments import describe, keep_in_bf16
from fp8doctor.facts import NOT_RECORDED, Arm, ArmName, Facts, LayerNumerics, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

ROUND_AS_EAGER = Treatment(
    name="round-as-eager",
    summary="let compiled code round where eager code does, as torchtitan does with rowwise scaling",
    code="import torch._inductor.config\n\n"
    "torch._inductor.config.emulate_precision_casts = True   # before the first step",
)
"""Compiled, the recompute of a norm before a rowwise FP8 layer can differ from the forward: the loss becomes
NaN. Sources: pytorch#150859, torchtitan b5bcd76 (``components/quantization/float8.py``)."""

NAMED = 3
"""Layers that the text names; the evidence lists all."""


@check(
    "NUM001",
    "non-finite",
    area="numerics",
    severity="error",
    explained_by=("NUM003", "trains-incorrectly"),
    changes_fp8=True,
)
def non_finite(facts: Facts) -> Finding | NotApplicable | None:
    finite = finite_steps(facts)
    if finite.now and not finite.bf16:
        return not_of_fp8_alone(finite, facts)
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    seen, bf16 = checked(facts, ArmName.AS_IS, ArmName.PRESCRIBED), checked(facts, *BF16_BASELINES)
    if not seen or not bf16:
        return NotApplicable(reason=f"the trial could not check a step in {'BF16' if seen else 'FP8'}")
    if finite.bf16 is False:
        return NotApplicable(reason="loss or gradients are not finite in BF16 either")
    bad = [each for each in seen if each.non_finite]
    layers = tuple(each.name for each in facts.get("trial.numerics", ()) if each.non_finite)
    if not bad and not layers:
        return None
    names = tuple(dict.fromkeys(name for each in bad for name in each.non_finite or ()))
    now = any(each.name == ArmName.AS_IS for each in bad)
    return Finding(
        severity="error" if bad else "warning",
        title=title(names, layers, now),
        explanation=f"With the same weights and batch, BF16 is finite.{fixed(bad, seen)} "
        f"{where(facts, layers)}",
        evidence={
            "non_finite": names,
            "arms": tuple(each.name for each in bad),
            "finite_arms": tuple(each.name for each in (*seen, *bf16) if not each.non_finite),
            "layers": layers,
        },
        breaks="not_finite" if now else NOT_RECORDED,
        treatment=treatment(facts, layers, now),
    )


def not_of_fp8_alone(finite: FiniteSteps, facts: Facts) -> Finding:
    """Report NaN that BF16 gives too, or that was not compared with BF16."""
    names = finite.now or ()
    watched = facts.get("not_finite")
    certain = bool(watched) or is_given(facts) or recorded(facts, "observed")
    said = [watched.where] if watched and watched.where else []
    if not certain:
        said.append("The batch is random: pass a real one with example_batch().")
    elif finite.bf16 is None:
        said.append("fp8doctor did not see this step in BF16: train without FP8 to know if FP8 is the cause.")
    else:
        said.append("FP8 is not the cause.")
    return Finding(
        severity=None if certain else "warning",
        title=f"NaN or infinity in {' and '.join(names)}"
        + (f", first in step {watched.step:,}" if watched else "")
        + (", in BF16 too" if finite.bf16 is False and uses_fp8(facts) else ""),
        explanation=" ".join(said),
        evidence={"non_finite": names, "step": watched.step if watched else None},
        breaks="not_finite" if certain else NOT_RECORDED,
    )


def title(names: tuple[str, ...], layers: tuple[str, ...], now: bool) -> str:
    """Say what is not finite, and in which step."""
    if names:
        where_in = "FP8" if now else "the fixed FP8 step, not in the step as it is"
        return f"NaN or infinity in {' and '.join(names)} in {where_in}"
    alone = plural(len(layers), "FP8 layer")
    return f"NaN or infinity in {alone} run alone, not compiled; all steps were finite"


def checked(facts: Facts, *names: str) -> list[Arm]:
    """List the variants of these names whose loss and gradients were checked."""
    found = (arm(facts.trial, name) for name in names)
    return [each for each in found if each and each.non_finite is not None]


def fixed(bad: list[Arm], seen: list[Arm]) -> str:
    """Say if the fixed step was finite: compiled code may saturate where other code does not."""
    only_as_is = [each.name for each in bad] == [ArmName.AS_IS] and len(seen) > 1
    return " With all fixes the step was finite." if only_as_is else ""


def where(facts: Facts, layers: tuple[str, ...]) -> str:
    """Name the layers that it comes from, if known."""
    if layers:
        more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        return f"Fed alone with the BF16 input, it begins in {', '.join(layers[:NAMED])}{more}."
    if facts.get("trial.numerics"):
        return (
            f"None of {plural(len(facts.trial.numerics), 'layer')}, fed alone and not compiled, gives any: "
            "it comes from compiled code, or builds up."
        )
    return "The layers were not tested one by one, so its source is unknown."


def treatment(facts: Facts, layers: tuple[str, ...], now: bool) -> Treatment | None:
    """Propose BF16 for the layers, else what is known of rowwise or delayed scaling; None if nothing is."""
    if layers:
        return keep_in_bf16(layers, facts)
    fp8 = [each for each in facts.network.linears if each.use == "training"]
    if now and any((each.recipe or "").startswith("rowwise") and each.compiled is not None for each in fp8):
        return ROUND_AS_EAGER
    return (
        describe("te-current", facts) if now and any(stack_of(each).under_autocast for each in fp8) else None
    )


def _overflow(*non_finite: str) -> Facts:
    """A step of two layers, the second of which overflows in FP8."""
    both = {ArmName.AS_IS: non_finite, ArmName.BF16: ()}
    arms = tuple(Arm(name=name, tried=True, non_finite=found) for name, found in both.items())
    counts = {"up": 0, "down": 64 if non_finite else 0}
    numerics = tuple(LayerNumerics(name=name, non_finite=count) for name, count in counts.items())
    return example(linears=tuple(map(float8, counts)), device="cuda", arms=arms, numerics=numerics)


FIRES = _overflow("loss", "gradients")
SILENT = _overflow()
