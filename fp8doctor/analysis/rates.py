"""Tokens a second of every variant, measured or modelled, and the GPU's limit."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.modelled_speedup import modelled_speedup
from fp8doctor.analysis.treatment_table import CHECKPOINTING_OFF
from fp8doctor.cost import (
    gemms,
    micro_batches,
    modelled_gpu,
    products_of,
    rows_of,
    rows_seen,
    step_tokens,
    visible_amd,
)
from fp8doctor.cost.matmul_counts import without_checkpointing
from fp8doctor.cost.step_cost import (
    in_bf16,
    modelled_step,
    with_linears_compiled,
    without_adapters,
)
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, is_of_first_window
from fp8doctor.facts.record import Record
from fp8doctor.finding import Basis
from fp8doctor.gpus import has_datasheet
from fp8doctor.recipes import stack_of


class Rate(Record, frozen=True, kw_only=True):
    """One variant of the step."""

    name: str
    """Of the variant; ``as_is_compiled`` for the step as it is with every Linear compiled."""
    step_ms: float
    tokens_per_s: float
    basis: Basis


class Rates(Record, frozen=True, kw_only=True):
    """The rates of the variants, and the limit of all."""

    variants: tuple[Rate, ...]
    gpu: str
    """Whose peaks these are, by the datasheet table; empty if it has none."""
    bf16_peak_tokens_per_s: float | None = None
    """With the matmuls of the Linears at the dense BF16 peak and all else for nothing."""
    fp8_peak_tokens_per_s: float | None = None


def rates(facts: Facts, *, as_it_seems: bool = True) -> Rates | None:
    """Compute the rates of this job; None if its tokens or times are unknown.

    If its FP8 layers are not ``as_it_seems``, no time is modelled for them.
    """
    tokens = step_tokens(facts)
    if not tokens or not recorded(facts, "network.linears") or not has_datasheet(facts):
        return None
    each = tokens * micro_batches(facts)
    times = list(_measured(facts)) or list(_watched(facts))
    basis: Basis = "measured" if times else "modelled"
    variants = tuple(
        Rate(name=name, step_ms=ms, tokens_per_s=each / ms * 1e3, basis=basis)
        for name, ms in times or _modelled(facts, as_it_seems)
    )
    gpu, flops = modelled_gpu(facts) or visible_amd(facts), if_recorded(gemm_flops, facts)
    of_gpu = gpu.name if gpu else ""
    if gpu is None or not flops:
        return Rates(variants=variants, gpu=of_gpu) if variants else None
    bf16, fp8 = (peak and tokens * peak * 1e12 / flops for peak in (gpu.bf16_tflops, gpu.fp8_tflops))
    return Rates(variants=variants, gpu=of_gpu, bf16_peak_tokens_per_s=bf16, fp8_peak_tokens_per_s=fp8)


def _measured(facts: Facts) -> Iterator[tuple[str, float]]:
    for arm in facts.arms():
        if arm.tried and arm.step_ms and not is_of_first_window(arm.name):
            yield arm.name, arm.step_ms


def _watched(facts: Facts) -> Iterator[tuple[str, float]]:
    """Return a script's step as it ran.

    Nothing is modelled next to it: the model knows neither communication nor waits for data.
    """
    if facts.get("observed.steps_ms"):
        yield ArmName.AS_IS.value, median(facts.observed.steps_ms)


def _modelled(facts: Facts, as_it_seems: bool) -> Iterator[tuple[str, float]]:
    plain = in_bf16(facts)
    variants = {
        ArmName.BF16.value: with_linears_compiled(plain, yes=False),
        ArmName.BF16_COMPILED.value: with_linears_compiled(plain, yes=True),
    }
    if uses_fp8(facts) and as_it_seems and if_recorded(modelled_speedup, facts) is not None:
        variants[ArmName.AS_IS.value] = facts
        fp8 = facts.network.fp8
        if all(stack_of(linear).fuses_casts for linear in fp8):
            variants["as_is_compiled"] = with_linears_compiled(facts, yes=True)
        variants |= _parts_left_out(facts, best_bf16=variants[ArmName.BF16_COMPILED.value])
    for name, variant in variants.items():
        step = if_recorded(modelled_step, variant)
        if step is not None:
            yield name, step.step_ms


def _parts_left_out(facts: Facts, best_bf16: Facts) -> dict[str, Facts]:
    """Model the step as it is without recomputation, and without the adapters."""
    variants, linears = {}, facts.network.linears
    if any(each.get("checkpointed") is not None for each in linears):
        variants[ArmName.BF16_WITHOUT_CHECKPOINTING.value] = without_checkpointing(best_bf16)
        variants[CHECKPOINTING_OFF] = without_checkpointing(facts)
    if any(each.get("adapter") == "adapter" for each in linears):
        variants[ArmName.WITHOUT_ADAPTERS.value] = without_adapters(facts)
    return variants


def gemm_flops(facts: Facts) -> float | None:
    """Count the matmul FLOPs of a micro-batch; None if experts' rows were not counted.

    Attention and recomputation are left out, and the input gradient of the first Linear.
    """
    total = 0.0
    for at, linear in enumerate(facts.network.linears):
        rows = rows_of(linear, facts)
        if not rows or _is_uncounted(linear, facts):
            return None
        passes = 1 + (at > 0) + (linear.requires_grad is not False)
        one = 2.0 * rows * linear.in_features * linear.out_features
        total += one * passes * products_of(linear, facts)
    return total


def _is_uncounted(linear: Linear, facts: Facts) -> bool:
    return linear.role == "experts" and gemms(linear) > 1 and not any(rows_seen(linear, facts))
