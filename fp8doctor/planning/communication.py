"""What links between GPUs add to a step: bytes of each kind of parallelism, and how much is not hidden."""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.gpus import GpuSpec
from fp8doctor.planning.options import OPTIMIZERS, Options
from fp8doctor.planning.share import Share
from fp8doctor.recipes import Recipe

HOST_GPUS = 8
"""GPUs of one host."""

NETWORK_GB_S = 50.0
"""Of one GPU's network adapter, one way: 400 Gbit/s, as in NVIDIA's DGX H100."""

LINK_EFFICIENCY = 0.75
"""Share of a link's rate that a large collective reaches. A convention until it is measured."""

HIDDEN = 0.9
"""Share of the computing time behind which FSDP's and DDP's communication can hide. A convention until it is
measured."""


class Exposed(NamedTuple):
    """Time that nothing hides, in ms."""

    micro_batch_ms: float
    step_ms: float


def exposed(share: Share, options: Options, gpu: GpuSpec, recipe: Recipe | None, busy_ms: float) -> Exposed:
    """Model the communication of one micro-batch and of the step's end beside ``busy_ms`` of computing."""
    tokens, hidden = options.tokens, share.facts.network.get("hidden_size") or 0
    activations = 2.0 * tokens * hidden
    tensor = 8 * _ring(activations, options.tp, options.tp, gpu) * share.blocks
    ranks = options.dp * options.cp
    weights, gradients = 2.0 * share.parameters, OPTIMIZERS[options.optimizer].gradient * share.trained
    width = options.tp * ranks
    if options.sharding == "fsdp":
        moved = 2 * _ring(weights, ranks, width, gpu) + _ring(gradients, ranks, width, gpu)
        return Exposed(tensor + max(0.0, moved - HIDDEN * busy_ms), 0.0)
    reduced = _ring(gradients, ranks, width, gpu) + _ring(
        gradients if options.sharding == "ddp" else weights, ranks, width, gpu
    )
    return Exposed(tensor, max(0.0, reduced - HIDDEN * busy_ms))


def _ring(bytes_moved: float, ranks: int, across: int, gpu: GpuSpec) -> float:
    """Time of an all-gather or reduce-scatter of so many bytes; an all-reduce takes two."""
    if ranks == 1:
        return 0.0
    rate = gpu.link_gb_s if across <= HOST_GPUS else min(NETWORK_GB_S, gpu.link_gb_s)
    return bytes_moved * (ranks - 1) / ranks / (rate * LINK_EFFICIENCY * 1e6)
