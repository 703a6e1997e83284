"""What was seen of the job's own step: whether it ran, in FP8, with how many FP8 matmuls, and finite.

A layer runs one FP8 matmul in the forward, one more if it is recomputed, one for the gradient of its input if
something trainable comes before it, and one for its weight's gradient if the weight is trained. In all steps
that were recorded on GPUs and ran as they should, the count is the sum to within 4% or three matmuls: fused
modules, cuts and micro-batches included. A checkpoint that stops recomputing early spares a matmul of each
region. Frozen layers of torchao that are not compiled run up to one more each, for a gradient that is unused.
"""

from collections.abc import Iterable
from typing import NamedTuple

from fp8doctor.analysis.layers import stores_fp8
from fp8doctor.analysis.significance import interval
from fp8doctor.analysis.treatment_table import AS_COPIED, AS_YOU_RUN_IT
from fp8doctor.cost.matmuls import gemms, micro_batches, passes, rows_seen
from fp8doctor.facts import NOT_RECORDED, Arm, Facts, Linear, Network, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.recipes import recipe_of, stack_of


def as_is(facts: Facts) -> Arm | None:
    """Find the step as it is in the trial, timed or not."""
    return next((arm for arm in facts.arms() if arm.get("name") == ArmName.AS_IS), None)


def watched(facts: Facts) -> Arm | None:
    """Write a script's watched steps, of any clock, as the variant ``as_is``; None if none was seen."""
    seen = facts.get("observed")
    if seen is None or not seen.get("steps_ms"):
        return None
    found = interval(seen.steps_ms)
    return Arm(
        name=ArmName.AS_IS,
        tried=True,
        step_ms=found.value,
        low_ms=found.low,
        high_ms=found.high,
        rounds_ms=seen.steps_ms,
        graphs_run=seen.get("graphs_run", NOT_RECORDED),
        fp8_gemms=seen.get("fp8_gemms", NOT_RECORDED),
        peak_gib=seen.get("peak_gib", NOT_RECORDED),
        breakdown=seen.get("breakdown", NOT_RECORDED),
    )


def ran_on_a_gpu(facts: Facts) -> bool:
    """Return whether the step as it is ran on a GPU, so does not raise."""
    if facts.get("observed.clock") == "cuda" and facts.observed.steps_ms:
        return True
    arm = as_is(facts)
    return bool(arm and arm.get("step_ms") is not None and facts.get("trial.device", "cpu") != "cpu")


def compiles_any(facts: Facts) -> bool:
    """Return whether the user compiles any Linear, not only a library some functions of its own."""
    return any(each.get("compiled") is not None for each in facts.linears())


def own_words(facts: Facts) -> str:
    """Choose words for the step as it is: timed copies of a watched script's step are not how it runs."""
    copied = facts.get("observed.steps_ms") and any(each.tried for each in facts.arms())
    return AS_COPIED if copied else AS_YOU_RUN_IT


def watched_job(facts: Facts) -> str:
    """Name the watched job: a script, or a training that a callback watched."""
    return "the training" if facts.get("target.kind") == "live" else "the script"


def ran_in_fp8(facts: Facts) -> bool | None:
    """Return whether a step, watched or timed, ran any FP8 matmul; None if no step shows it.

    Emulated FP8 has none. A layer that notes itself that it ran in FP8 may have kernels of unknown names.
    """
    counted, timed = facts.get("observed.fp8_gemms"), as_is(facts)
    fp8 = [each for each in facts.network.fp8 if not each.get("features", {}).get("emulate")]
    if counted == 0 and fp8 and not any(each.get("engaged") for each in fp8):
        return False
    if timed and why_of(timed) is Reason.NO_FP8_GEMM:
        return False
    return True if counted or (timed and timed.tried and timed.get("fp8_gemms")) else None


def outside_autocast(facts: Facts) -> bool:
    """Return whether no FP8 autocast is open and all FP8 layers, Transformer Engine's, need one.

    Raises `Unrecorded` if the step could not be read.
    """
    own = all(stack_of(each).under_autocast and each.engaged is None for each in facts.network.fp8)
    return own and facts.training.fp8_autocast is False


END = 0.25
"""Share of the FP8 layers that may be left out at either end. A choice: recipes keep one block there, and
torchtitan's NVFP4 keeps the last 15% of the layers in BF16."""


def kept_in_bf16(linears: Iterable[Linear]) -> frozenset[str]:
    """Name the first and last few FP8 layers if only they ran in BF16.

    Empty if others ran in BF16 too: then the autocast is missing.
    """
    fp8 = [linear for linear in linears if linear.use == "training"]
    ran = [i for i, each in enumerate(fp8) if each.get("engaged") is not False]
    if not ran or ran[-1] - ran[0] + 1 != len(ran) or max(ran[0], len(fp8) - 1 - ran[-1]) > END * len(fp8):
        return frozenset()
    return frozenset(linear.name for linear in (*fp8[: ran[0]], *fp8[ran[-1] + 1 :]))


def multiplied_in_fp8(network: Network) -> list[Linear]:
    """List the FP8 layers that call an FP8 matmul: not in BF16, and not emulated."""
    kept = kept_in_bf16(network.fp8)
    return [each for each in network.fp8 if each.name not in kept and not each.features.get("emulate")]


WITHIN = 0.1
"""Share of all matmuls below which a difference tells nothing: three matmuls are 7% of the smallest job that
was recorded."""


def counted_gemms(facts: Facts) -> int | None:
    arm = as_is(facts)
    if arm is not None and recorded(arm, "fp8_gemms") and facts.trial.device != "cpu":
        return arm.fp8_gemms or None
    return facts.get("observed.fp8_gemms") or None if facts.get("observed.clock") == "cuda" else None


def due_gemms(facts: Facts, linears: Iterable[Linear]) -> tuple[int, int, int]:
    """Count the FP8 matmuls of these layers in one step: forward, recompute, gradients."""
    arm, left_out = as_is(facts), tuple[str, ...]()
    if arm is not None and arm.get("cuts"):  # the counted cut does not have these blocks
        kept = arm.cuts[-1].blocks
        left_out = tuple(
            f"{name}.{number}."
            for name, count in facts.trial.blocks.items()
            for number in range(kept.get(name, count), count)
        )
    forward = recomputed = gradients = 0
    for linear in linears:
        if not linear.name.startswith(left_out):
            times = gemms(linear) * (len(rows_seen(linear, facts)) or 1) * micro_batches(facts)
            in_16_bits = recipe_of(linear).weight_gradient_in_16_bits and linear.requires_grad
            forward += times
            recomputed += times * (linear.get("checkpointed") is not None)
            gradients += times * max(0, passes(linear) - 1 - in_16_bits)
    return forward, recomputed, gradients


def all_fp8(facts: Facts) -> list[Linear]:
    """List the layers whose FP8 matmuls are counted; empty if one of them cannot be.

    Emulated FP8 has none, a router decides on those of experts, and a user's own configuration is not read.
    """
    fp8 = facts.network.fp8
    told = all(
        each.recipe != "custom" and each.role != "experts" and not each.features.get("emulate")
        for each in fp8
    )
    return fp8 if told else []


def ran_in_bf16_later(facts: Facts, suspects: Iterable[Linear]) -> bool | None:
    """Return whether these layers ran in FP8 in the forward only; None if unclear.

    It is clear if their later matmuls are a visible share of all, and the count is nearer to one of the two.
    """
    counted = counted_gemms(facts)
    if counted is None or not (fp8 := all_fp8(facts)):
        return None
    due, half = sum(due_gemms(facts, fp8)), sum(due_gemms(facts, suspects)[1:]) / 2
    return None if half <= WITHIN * due else counted < due - half


class FiniteSteps(NamedTuple):
    """What of the job's own step, watched or timed, was not finite, and whether BF16 is; None if unknown."""

    now: tuple[str, ...] | None
    """``loss``, ``gradients``; empty if finite."""
    bf16: bool | None
    """With the same weights and batch, in every form: the job's own step if the model holds no FP8."""


def finite_steps(facts: Facts) -> FiniteSteps:
    now: tuple[str, ...] | None = None
    if found := facts.get("not_finite"):
        now = (found.what,)
    elif losses := facts.get("observed.losses"):
        now = ("loss",) if None in losses else ()
    for each in _not_finite(facts, ArmName.AS_IS):
        now = tuple(dict.fromkeys((*(now or ()), *each)))
    bf16 = [not each for each in _not_finite(facts, *BF16_BASELINES)]
    if now is not None and recorded(facts, "network.linears"):
        network = facts.network
        fp8 = any(each.use in ("training", "unknown") or stores_fp8(each) for each in network.linears)
        if not (fp8 or network.get("float8_parameters") or network.get("fp8_calls")):
            bf16.append(not now)
    return FiniteSteps(now, all(bf16) if bf16 else None)


def _not_finite(facts: Facts, *names: str) -> list[tuple[str, ...]]:
    """List what was not finite in the variants of these names that the trial looked at."""
    found = (each.get("non_finite") for each in facts.arms() if each.name in names and each.tried)
    return [each for each in found if each is not None]
