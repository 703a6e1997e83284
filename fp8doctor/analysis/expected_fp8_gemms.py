"""Expected FP8 matmuls per step, layer by layer, and those that were observed.

A layer runs one matmul in the forward, one more if it is recomputed, one for the gradient of its input if
something trainable comes before it, and one for its weight's gradient if the weight is trained. In all steps
that were recorded on GPUs and ran as they should, the count is the sum to within 4% or three matmuls: fused
modules, cuts and micro-batches included. A checkpoint that stops recomputing early spares a matmul of each
region. Frozen layers of torchao that are not compiled run up to one more each, for a gradient that is unused.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fp8doctor.analysis.own_step import as_is
from fp8doctor.cost.matmul_counts import gemms, micro_batches, passes, rows_seen
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.recipes import recipe_of

END = 0.25
"""Share of the FP8 layers that may be left out at either end. A choice: recipes keep one block there, and
torchtitan's NVFP4 keeps the last 15% of the layers in BF16."""


def multiplied_in_fp8(linears: Iterable[Linear]) -> list[Linear]:
    """List the FP8 layers that call an FP8 matmul: not in BF16, and not emulated."""
    linears = tuple(linears)
    kept = kept_in_bf16(linears)
    return [
        linear
        for linear in linears
        if linear.use == "training" and linear.name not in kept and not linear.features.get("emulate")
    ]


def kept_in_bf16(linears: Iterable[Linear]) -> frozenset[str]:
    """Name the first and last few FP8 layers if only they ran in BF16.

    Empty if others ran in BF16 too: then the autocast is missing.
    """
    fp8 = [linear for linear in linears if linear.use == "training"]
    ran = [i for i, each in enumerate(fp8) if each.get("engaged") is not False]
    if not ran or ran[-1] - ran[0] + 1 != len(ran):
        return frozenset()
    if max(ran[0], len(fp8) - 1 - ran[-1]) > END * len(fp8):
        return frozenset()
    return frozenset(linear.name for linear in (*fp8[: ran[0]], *fp8[ran[-1] + 1 :]))


WITHIN = 0.1
"""Share of all matmuls below which a difference tells nothing: three matmuls are 7% of the smallest job that
was recorded."""


class Due(NamedTuple):
    """FP8 matmuls of some layers in one step."""

    forward: int
    recomputed: int
    gradients: int


def counted_gemms(facts: Facts) -> int | None:
    arm = as_is(facts)
    if arm is not None and recorded(arm, "fp8_gemms") and facts.trial.device != "cpu":
        return arm.fp8_gemms or None
    on_gpu = facts.get("observed.clock") == "cuda"
    return facts.get("observed.fp8_gemms") or None if on_gpu else None


def due_gemms(facts: Facts, linears: Iterable[Linear]) -> Due:
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
    """List the layers whose FP8 matmuls are counted; empty if one of them cannot be.

    Emulated FP8 has none, a router decides on those of experts, and a user's own configuration is not read.
    """
    fp8 = facts.network.fp8
    told = all(
        linear.recipe != "custom" and linear.role != "experts" and not linear.features.get("emulate")
        for linear in fp8
    )
    return fp8 if told else []


def ran_in_bf16_later(facts: Facts, suspects: Iterable[Linear]) -> bool | None:
    """Return whether these layers ran in FP8 in the forward only; None if unclear.

    It is clear if their later matmuls are a visible share of all, and the count is nearer to one of the two.
    """
    counted = counted_gemms(facts)
    if counted is None or not (fp8 := all_fp8(facts)):
        return None
    due, theirs = due_gemms(facts, fp8), due_gemms(facts, suspects)
    half = (theirs.recomputed + theirs.gradients) / 2
    return None if half <= WITHIN * sum(due) else counted < sum(due) - half


def _gradients(linear: Linear) -> int:
    """Count the FP8 matmuls of its backward."""
    in_16_bits = recipe_of(linear).weight_gradient_in_16_bits and linear.requires_grad
    return max(0, passes(linear) - 1 - in_16_bits)


def _left_out(facts: Facts) -> tuple[str, ...]:
    """List the name prefixes of blocks that the counted cut does not have."""
    arm = as_is(facts)
    if arm is None or not arm.get("cuts"):
        return ()
    kept = arm.cuts[-1].blocks
    return tuple(
        f"{name}.{number}."
        for name, count in facts.trial.blocks.items()
        for number in range(kept.get(name, count), count)
    )
