"""Expected FP8 GEMMs per step, layer by layer, and those that were observed.

A layer runs one GEMM in the forward, one more if it is recomputed, one for the gradient of its input if
something trainable comes before it, and one for its weight's gradient if the weight is trained. In all steps
that were recorded on GPUs and ran as they should, the count is the sum to within 4 % or three GEMMs: fused
modules, cuts and micro-batches included. A checkpoint that stops recomputing early spares a GEMM of each
region. Frozen layers of torchao that are not compiled run up to one more each, for a gradient that is unused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fp8doctor.cost import gemms, micro_batches, rows_seen
from fp8doctor.facts import Arm, Facts, Linear, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.recipes import recipe_of

END = 0.25
"""Share of the FP8 layers that may be left out at either end. A choice: recipes keep one block there, and
torchtitan's NVFP4 keeps the last 15 % of the layers in BF16."""


def multiplied_in_fp8(linears: Iterable[Linear]) -> list[Linear]:
    """List the FP8 layers that call an FP8 GEMM of the GPU: neither kept in BF16 nor emulated."""
    linears = tuple(linears)
    kept = kept_in_bf16(linears)
    return [
        linear
        for linear in linears
        if linear.use == "training" and linear.name not in kept and not linear.features.get("emulate")
    ]


def kept_in_bf16(linears: Iterable[Linear]) -> frozenset[str]:
    """Name the first and the last few FP8 layers where they alone ran in BF16, and all between them in FP8.

    Empty where others ran in BF16 too: then the autocast is missing.
    """
    fp8 = [linear for linear in linears if linear.use == "training"]
    ran = [i for i, each in enumerate(fp8) if each.get("engaged") is not False]
    if not ran or ran[-1] - ran[0] + 1 != len(ran):
        return frozenset()
    if max(ran[0], len(fp8) - 1 - ran[-1]) > END * len(fp8):
        return frozenset()
    return frozenset(linear.name for linear in (*fp8[: ran[0]], *fp8[ran[-1] + 1 :]))


WITHIN = 0.1
"""Share of all GEMMs below which a difference tells nothing: three GEMMs are 7% of the smallest job that was
recorded."""


class Due(NamedTuple):
    """FP8 GEMMs of some layers in one step."""

    forward: int
    recomputed: int
    gradients: int


def counted_gemms(facts: Facts) -> int | None:
    """Tell how many FP8 GEMMs a step of the job ran on a GPU; None where none was seen, or nobody counted."""
    arm = _as_is(facts)
    if arm is not None and facts.trial.device != "cpu":
        return arm.fp8_gemms or None
    on_gpu = facts.get("observed.clock") == "cuda"
    return facts.get("observed.fp8_gemms") or None if on_gpu else None


def due_gemms(facts: Facts, linears: Iterable[Linear]) -> Due:
    """Sum up what these layers should run in the step whose GEMMs were counted, which may be one of a cut."""
    left_out = _left_out(facts)
    forward = recomputed = gradients = 0
    for linear in linears:
        if not linear.name.startswith(left_out):
            times = gemms(linear) * (len(rows_seen(linear, facts)) or 1) * micro_batches(facts)
            forward += times
            recomputed += times * (linear.get("checkpointed") is not None)
            gradients += times * _gradients(linear)
    return Due(forward, recomputed, gradients)


def all_fp8(facts: Facts) -> list[Linear]:
    """List the layers whose FP8 GEMMs are counted; empty where one of them runs none that can be told.

    Emulated FP8 has none, the router decides on those of experts, and what a user's own configuration leaves
    in 16 bits is not read.
    """
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    told = all(
        linear.recipe != "custom" and linear.role != "experts" and not linear.features.get("emulate")
        for linear in fp8
    )
    return fp8 if told else []


def ran_in_bf16_later(facts: Facts, suspects: Iterable[Linear]) -> bool | None:
    """Whether these layers ran in FP8 in the forward alone, by the count; None where it does not tell.

    It tells where what they run later is enough of all to be seen, and says which it is nearer to.
    """
    counted = counted_gemms(facts)
    if counted is None or not (fp8 := all_fp8(facts)):
        return None
    due, theirs = due_gemms(facts, fp8), due_gemms(facts, suspects)
    half = (theirs.recomputed + theirs.gradients) / 2
    return None if half <= WITHIN * sum(due) else counted < sum(due) - half


def _gradients(linear: Linear) -> int:
    """Count the FP8 GEMMs of its backward, from the FLOPs that were counted for a token."""
    passes = 3 if linear.requires_grad else 2
    if flops := linear.get("flops_per_token"):
        passes = round(flops / (2.0 * linear.in_features * linear.out_features * gemms(linear)))
    in_16_bits = recipe_of(linear).weight_gradient_in_16_bits and linear.requires_grad
    return max(0, passes - 1 - in_16_bits)


def _left_out(facts: Facts) -> tuple[str, ...]:
    """Name the blocks that the cut whose GEMMs were counted does not have, as the names of layers begin."""
    arm = _as_is(facts)
    if arm is None or not arm.get("cuts"):
        return ()
    kept = arm.cuts[-1].blocks
    return tuple(
        f"{name}.{number}."
        for name, count in facts.trial.blocks.items()
        for number in range(kept.get(name, count), count)
    )


def _as_is(facts: Facts) -> Arm | None:
    """Find the step as it is, if its GEMMs were counted."""
    return next(
        (arm for arm in facts.arms() if arm.name == ArmName.AS_IS and recorded(arm, "fp8_gemms")), None
    )
