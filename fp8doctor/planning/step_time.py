"""The time of one step on one GPU of a job, by parts."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.cost.layer import Call, calls_ms
from fp8doctor.cost.step_cost import (
    LOSS_BYTES,
    OPTIMIZER_BYTES,
    attention_ms,
    in_balance,
    loss_ms,
    with_linears,
)
from fp8doctor.facts import Facts
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.planning.communication import exposed
from fp8doctor.planning.job_options import OPTIMIZERS, Options
from fp8doctor.planning.share import Layer, Share, is_converted, weights_cast
from fp8doctor.recipes import Recipe

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

    @property
    def rounded(self) -> dict[str, float]:
        return {part: round(ms, 3) for part, ms in self.parts.items() if ms}

    def scaled(self, times: float) -> Step:
        return replace(self, parts={part: ms * times for part, ms in self.parts.items()})


def step_of(share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, *, stack: str) -> Step:
    """Model the compiled step in BF16 or with a recipe of this stack. Raises `NoNumbers`."""
    calls = [call_of(each, options, recipe, stack=stack) for each in share.layers]
    found = calls_ms(calls, gpu, "compiled", autocast=False)
    parts: dict[Part, float] = dict.fromkeys(get_args(Part), 0.0)
    for call, times in found.families:
        gemm = times["gemm_fp8"] + times["gemm_16bit"]
        if call.linear.role == "head":
            parts["head"] += gemm
        elif call.linear.role == "experts" and call.linear.use == "none":
            parts["experts"] += gemm
        else:
            parts["matmuls"] += gemm
        parts["casts"] += times["cast"]
        parts["pointwise"] += times["pointwise"]
    parts["attention"] = attention_ms(as_checkpointed(share, options), gpu) / options.tp / options.pp
    parts["head"] += loss_ms(share.facts, gpu, LOSS_BYTES["fp32"]) / options.tp
    busy = sum(parts.values())
    forward = {part: ms * options.accumulate for part, ms in parts.items()}
    held = share.trained.all if options.sharding == "ddp" else share.trained.sharded(options)
    forward["optimizer"] = memory_ms(EFFECTIVE * OPTIMIZERS[options.optimizer].moved * held, gpu)
    on_gpu, on_host = sum(forward.values()), found.host * options.accumulate
    forward["host"] = max(on_host - on_gpu, found.gaps * options.accumulate)
    links = exposed(share, options, gpu, recipe, busy, stack=stack)
    forward["communication"] = links.micro_batch_ms * options.accumulate + links.step_ms
    forward["bubble"] = (busy + links.micro_batch_ms) * (options.pp - 1)
    return Step(forward, in_balance(on_gpu, on_host))


def as_checkpointed(share: Share, options: Options) -> Facts:
    checkpointed = "" if options.checkpointing == "full" else None
    linears = (replace(each, checkpointed=checkpointed) for each in share.facts.network.linears)
    return with_linears(share.facts, linears)


def call_of(layer: Layer, options: Options, recipe: Recipe | None, *, stack: str) -> Call:
    """Describe a layer as it runs, compiled, in BF16, or with the recipe if a conversion takes it."""
    own = recipe if is_converted(layer, recipe) else None
    is_head = layer.linear.role == "head"
    linear = replace(
        layer.linear,
        compiled=None if is_head else "",
        dtype="bfloat16",
        use="training" if own else "none",
        stack=own.stack if own else stack,
        recipe=own.name if own else None,
        features={},
    )
    return Call(
        linear,
        layer.rows,
        layer.count,
        recomputed=0.0 if is_head else RECOMPUTED[options.checkpointing],
        weights_cast=weights_cast(own, options) if own else 1.0,
        beside=sum(layer.sides) / (linear.in_features + linear.out_features),
    )
