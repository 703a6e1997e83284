"""The time of one step on one GPU of a job, by parts."""

from __future__ import annotations

from math import prod
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import BALANCE
from fp8doctor.cost.cast_cost import MOST_ROWS_CAST_EAGERLY
from fp8doctor.cost.grouped import launches, rows_of_one
from fp8doctor.cost.step_cost import (
    GAP_MS,
    HOST_MS,
    KERNELS,
    LOSS_BYTES,
    OPTIMIZER_BYTES,
    attention_ms,
    layer_ms,
    loss_ms,
    uncompiled,
    with_linears,
)
from fp8doctor.facts import Facts
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.planning.communication import exposed
from fp8doctor.planning.job_options import OPTIMIZERS, Options
from fp8doctor.planning.share import Layer, Share, is_converted, weights_cast
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

EFFECTIVE = OPTIMIZER_BYTES / OPTIMIZERS["adamw"].moved
"""Effective bytes of a fused AdamW step / the bytes it moves."""

RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Share of the matmuls that the backward repeats."""


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
    parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
    host = kernels = 0.0
    for layer in share.layers:
        own = recipe if is_converted(layer, recipe) else None
        times = linear_ms(layer, share, options, gpu, own, stack=stack, compiled=compiled)
        if times is None:
            return None
        one = replace(layer.linear, stack=stack)
        calls = layer.count * launches(one)
        for part, ms in times.items():
            parts[part] += layer.count * ms
        host += calls * HOST_MS["compiled" if compiled else "eager"]
        kernels += calls * KERNELS
        if own is not None:
            launch = STACKS[own.stack].compiled if compiled else STACKS[own.stack].eager
            host += layer.count * launches(one, weights_cast(own, options)) * launch.host_ms
            kernels += calls * launch.kernels
    parts["attention"] = attention_ms(as_checkpointed(share, options), gpu) / options.tp / options.pp
    parts["head"] += loss_ms(share.facts, gpu, LOSS_BYTES["fp32"]) / options.tp
    busy = sum(parts.values())
    forward = {part: ms * options.accumulate for part, ms in parts.items()}
    forward["optimizer"] = optimizer_ms(share, options, gpu)
    on_gpu, on_host = sum(forward.values()), host * options.accumulate
    forward["host"] = max(on_host - on_gpu, GAP_MS * kernels * options.accumulate)
    links = exposed(share, options, gpu, recipe, busy, stack=stack)
    forward["communication"] = links.micro_batch_ms * options.accumulate + links.step_ms
    forward["bubble"] = (busy + links.micro_batch_ms) * (options.pp - 1)
    return Step(forward, BALANCE * on_gpu <= on_host <= on_gpu / BALANCE)


def as_checkpointed(share: Share, options: Options) -> Facts:
    """Mark the layers that the backward computes again."""
    checkpointed = "" if options.checkpointing == "full" else None
    linears = (replace(each, checkpointed=checkpointed) for each in share.facts.network.linears)
    return with_linears(share.facts, tuple(linears))


def linear_ms(
    layer: Layer,
    share: Share,
    options: Options,
    gpu: GpuSpec,
    recipe: Recipe | None,
    *,
    stack: str,
    compiled: bool,
) -> dict[Part, float] | None:
    """Model one call of a layer and its surroundings."""
    linear = replace(
        layer.linear,
        compiled="" if compiled and layer.linear.role != "head" else None,
        checkpointed=None,
        dtype="bfloat16",
        use="training" if recipe else "none",
        stack=recipe.stack if recipe else stack,
        recipe=recipe.name if recipe else None,
        features={},
    )
    how = uncompiled(share.facts)
    if recipe and not compiled and rows_of_one(linear, layer.rows) > MOST_ROWS_CAST_EAGERLY:
        return None
    times = layer_ms(linear, layer.rows, gpu, how)
    again = RECOMPUTED[options.checkpointing]
    if times is not None and again and linear.role != "head":
        whole = layer_ms(replace(linear, checkpointed=""), layer.rows, gpu, how)
        times = whole and {
            part: ms + (1.0 if part == "pointwise" else again) * (whole[part] - ms)
            for part, ms in times.items()
        }
    if times is None:
        return None
    gemm = times["gemm_fp8"] + times["gemm_16bit"] + times["gemm_fp32"]
    between = times["pointwise"] * sum(layer.sides) / (linear.in_features + linear.out_features)
    if linear.role == "head":
        return {"head": gemm + times["cast"] + between}
    casts = times["cast"]
    if recipe and recipe.cast_bytes:
        sides = linear.in_features, linear.out_features
        weights = prod(sides) * linear.get("gemms", 1)
        saved = memory_ms(recipe.cast_bytes.weight * weights, gpu) * (1 - weights_cast(recipe, options))
        if linear.requires_grad is False:  # nothing is cast for a weight gradient
            moved = recipe.cast_bytes.activation * layer.rows * sum(sides)
            saved += memory_ms(moved * (1 - recipe.frozen_cast_share), gpu)
        casts -= min(casts, saved)
    part: Part = "experts" if linear.role == "experts" and recipe is None else "matmuls"
    return {part: gemm, "casts": casts, "pointwise": between}


def optimizer_ms(share: Share, options: Options, gpu: GpuSpec) -> float:
    """Model the optimizer's step over what it holds on one GPU."""
    held = share.trained.all if options.sharding == "ddp" else share.trained.sharded(options)
    return memory_ms(EFFECTIVE * OPTIMIZERS[options.optimizer].moved * held, gpu)
