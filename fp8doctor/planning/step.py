"""The time of one step on one GPU of a job, by parts."""

from __future__ import annotations

from math import prod
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import BALANCE
from fp8doctor.cost.cast_cost import MOST_ROWS_CAST_EAGERLY
from fp8doctor.cost.gemm import GEMM_EFFICIENCY_BF16
from fp8doctor.cost.grouped import BF16_EFFICIENCY, MXFP8_EFFICIENCY
from fp8doctor.cost.step_cost import (
    GAP_MS,
    HOST_MS,
    KERNELS,
    LOSS_BYTES,
    attention_ms,
    layer_ms,
    loss_ms,
)
from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.planning.communication import Exposed, exposed
from fp8doctor.planning.conversion import is_converted, weights_cast
from fp8doctor.planning.options import OPTIMIZERS, Options
from fp8doctor.planning.share import Layer, Share
from fp8doctor.recipes import STACKS, Recipe

Part = Literal[
    "matmuls",
    "casts",
    "attention",
    "head",
    "experts",
    "pointwise",
    "communication",
    "optimizer",
    "host",
    "bubble",
]

EFFECTIVE = 24.0 / 14.0
"""Effective bytes of a fused AdamW step / the bytes it moves: `fp8doctor.cost.step_cost.OPTIMIZER_BYTES`."""


class Step(Struct, frozen=True):
    """One step, with its parts in ms."""

    parts: dict[Part, float]
    in_balance: bool
    """Whether host and GPU take about as long, so that the step takes longer than either."""

    @property
    def ms(self) -> float:
        return sum(self.parts.values())


def step_of(
    share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, *, stack: str, compiled: bool
) -> Step | None:
    """Model the step in BF16 or with a recipe of this stack; None without numbers for a part of it."""
    parts: dict[Part, float] = dict.fromkeys(Part.__args__, 0.0)  # type: ignore[attr-defined]
    host = kernels = 0.0
    for layer in share.layers:
        fp8 = is_converted(layer, recipe)
        if layer.linear.role == "experts":
            times = experts_ms(layer, gpu, recipe if fp8 else None, options)
        else:
            found = linear_ms(layer, share, options, gpu, recipe if fp8 else None, compiled=compiled)
            if found is None:
                return None
            times = found
        for part, ms in times.items():
            parts[part] += layer.count * ms
        calls = layer.count * (1 if layer.linear.role == "experts" else layer.linear.get("gemms", 1))
        host += calls * HOST_MS["compiled" if compiled else "eager"]
        kernels += calls * KERNELS
        if fp8 and recipe is not None:
            launch = STACKS[recipe.stack].compiled if compiled else STACKS[recipe.stack].eager
            host += calls * launch.host_ms
            kernels += calls * launch.kernels
    again = options.checkpointing == "full"
    marked = replace(share.facts, network=replace(share.facts.network, linears=_marked(share, again)))
    parts["attention"] = attention_ms(marked, gpu) / options.tp / options.pp
    parts["head"] += loss_ms(share.facts, gpu, LOSS_BYTES["fp32"]) / options.tp
    busy = sum(parts.values())
    forward = {part: ms * options.accumulate for part, ms in parts.items()}
    forward["optimizer"] = optimizer_ms(share, options, gpu)
    on_gpu, on_host = sum(forward.values()), host * options.accumulate
    forward["host"] = max(on_host - on_gpu, GAP_MS * kernels * options.accumulate)
    links: Exposed = exposed(share, options, gpu, recipe, busy, stack=stack)
    forward["communication"] = links.micro_batch_ms * options.accumulate + links.step_ms
    forward["bubble"] = (busy + links.micro_batch_ms) * (options.pp - 1)
    return Step(forward, BALANCE * on_gpu <= on_host <= on_gpu / BALANCE)


def _marked(share: Share, again: bool) -> tuple[Linear, ...]:
    linears = share.facts.network.linears
    return tuple(replace(each, checkpointed="" if again else None) for each in linears)


def linear_ms(
    layer: Layer, share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, *, compiled: bool
) -> dict[Part, float] | None:
    """Model one call of a layer and its surroundings."""
    linear = replace(
        layer.linear,
        compiled="" if compiled and layer.linear.role != "head" else None,
        checkpointed=None,
        dtype="bfloat16",
        use="training" if recipe else "none",
        stack=recipe.stack if recipe else "torch",
        recipe=recipe.name if recipe else None,
        features={},
    )
    how = "eager transformers" if _of_transformers(share) else "eager"
    if recipe and not compiled and layer.rows > MOST_ROWS_CAST_EAGERLY:
        return None
    times = layer_ms(linear, layer.rows, gpu, how)
    if times is not None and options.checkpointing != "none" and linear.role != "head":
        whole = layer_ms(replace(linear, checkpointed=""), layer.rows, gpu, how)
        share_of_it = 1.0 if options.checkpointing == "full" else 0.5
        times = whole and {
            part: ms + (1.0 if part == "pointwise" else share_of_it) * (whole[part] - ms)
            for part, ms in times.items()
        }
    if times is None:
        return None
    gemm = times["gemm_fp8"] + times["gemm_16bit"] + times["gemm_fp32"]
    between = times["pointwise"] * layer.around / (linear.in_features + linear.out_features)
    if linear.role == "head":
        return {"head": gemm + times["cast"] + between}
    casts = times["cast"]
    if recipe and recipe.cast_bytes:
        sides = linear.in_features, linear.out_features
        saved = memory_ms(recipe.cast_bytes.weight * prod(sides), gpu) * (1 - weights_cast(recipe, options))
        if linear.requires_grad is False:  # nothing is cast for a weight gradient
            moved = recipe.cast_bytes.activation * layer.rows * sum(sides)
            saved += memory_ms(moved * (1 - recipe.frozen_cast_share), gpu)
        casts -= min(casts, saved)
    return {"matmuls": gemm, "casts": casts, "pointwise": between}


def _of_transformers(share: Share) -> bool:
    return any(each.get("kind", "").startswith("transformers.") for each in share.facts.blocks())


def experts_ms(layer: Layer, gpu: GpuSpec, recipe: Recipe | None, options: Options) -> dict[Part, float]:
    """Model the grouped matmuls of one expert weight, with their casts."""
    k, n, count = layer.linear.in_features, layer.linear.out_features, layer.linear.get("gemms", 1)
    one = 2.0 * layer.rows * k * n / 1e9
    trained = layer.linear.requires_grad is not False
    again = {"none": 0.0, "selective": 0.5, "full": 1.0}[options.checkpointing]
    if recipe is None or gpu.fp8_tflops is None:
        efficiency = min(BF16_EFFICIENCY / GEMM_EFFICIENCY_BF16, 1.0) * GEMM_EFFICIENCY_BF16
        return {"experts": (2 + trained + again) * one / (gpu.bf16_tflops * efficiency)}
    output, inputs, weights = (one / (gpu.fp8_tflops * each) for each in MXFP8_EFFICIENCY)
    elements = layer.rows * (k + n) + count * k * n
    casts = (
        memory_ms((recipe.grouped_cast_bytes or 0.0) * elements, gpu) + recipe.grouped_scales_ms * layer.rows
    )
    return {"experts": output * (1 + again) + inputs + (weights if trained else 0.0), "casts": casts}


def optimizer_ms(share: Share, options: Options, gpu: GpuSpec) -> float:
    """Model the optimizer's step over what it holds on one GPU."""
    held = share.trained.all if options.sharding == "ddp" else share.trained.sharded(options)
    return memory_ms(EFFECTIVE * OPTIMIZERS[options.optimizer].moved * held, gpu)
