"""What links between GPUs add to a step. Ranks of tensor parallelism are next to each other on a host, then
those of experts, context and data."""

from __future__ import annotations

from fp8doctor.gpus import GpuSpec
from fp8doctor.planning.job_options import Options
from fp8doctor.planning.share import Amount, Share

NETWORK_GB_S = 50.0
"""Of one GPU's network adapter, one way: 400 Gbit/s, as in NVIDIA's DGX H100."""

LINK_EFFICIENCY = 0.75
"""Share of a link's rate that a large collective reaches. A convention until it is measured."""

HIDDEN = 0.9
"""Share of the computing time behind which FSDP's and DDP's communication can hide. A convention until it is
measured."""


def inside_ms(share: Share, options: Options, gpu: GpuSpec, busy_ms: float, *, overlaps: bool) -> float:
    """Model the communication inside of one micro-batch that ``busy_ms`` of computing does not hide.

    Transformer Engine ``overlaps``: it cuts matmuls into a part for each rank of tensor parallelism and sends
    the next part meanwhile (``ub_overlap_ag`` and ``ub_overlap_rs``, Megatron's ``tp_comm_overlap``), so one
    part's remains. That of torch is asynchronous only if asked.
    """
    times = 12 if options.checkpointing == "full" else 8  # gathers and scatters of a block, both ways
    tensor = times * share.blocks * _ring(2.0 * options.tokens * share.hidden, options.tp, 1, gpu)
    inside = tensor / (options.tp if overlaps else 1) + experts_ms(share, options, gpu)
    network = share.facts.network
    part = (network.get("key_value_heads") or 1) / (network.get("heads") or 1)
    keys = 2 * 2.0 * options.batch * options.seq * share.hidden * part / options.tp
    context = 3 * share.blocks * _ring(keys, options.cp, options.tp * options.ep, gpu)
    return inside + max(0.0, context - HIDDEN * busy_ms)


def experts_ms(share: Share, options: Options, gpu: GpuSpec) -> float:
    """Time the exchange of tokens before and behind the experts, forward and backward.

    In 16 bits, whatever the experts' recipe. Sequence parallelism leaves each rank its part of the tokens.
    """
    sent = sum(
        2.0 * each.rows * each.count * share.hidden
        for each in share.layers
        if each.linear.role == "experts" and each.linear.in_features == share.hidden
    )
    return 4 * _exchange(sent / options.tp, options.ep, options.tp, gpu)


def of_ranks_ms(amount: Amount, each: float, options: Options, gpu: GpuSpec) -> float:
    """Time one gather or scatter of all parameters over the ranks that share them."""
    return _ring(each * amount.dense, options.ranks, options.tp, gpu) + _ring(
        each * amount.experts, options.ranks // options.ep, options.tp * options.ep, gpu
    )


def _exchange(bytes_moved: float, ranks: int, inner: int, gpu: GpuSpec) -> float:
    """Time an all-to-all: each rank sends what leaves its host through its own adapter."""
    of_host = max(1, gpu.link_gpus // inner)
    if ranks <= of_host:
        return _ring(bytes_moved, ranks, inner, gpu)
    return bytes_moved * (ranks - of_host) / ranks / (NETWORK_GB_S * LINK_EFFICIENCY * 1e6)


def _ring(bytes_moved: float, ranks: int, inner: int, gpu: GpuSpec) -> float:
    """Time a gather or scatter over ranks that are ``inner`` GPUs apart.

    Beyond the GPUs that links join, the ranks among them use their adapters together.
    """
    if ranks == 1:
        return 0.0
    of_host = max(1, gpu.link_gpus // inner)
    rate = gpu.link_gb_s if ranks <= of_host else min(gpu.link_gb_s, NETWORK_GB_S * of_host)
    return bytes_moved * (ranks - 1) / ranks / (rate * LINK_EFFICIENCY * 1e6)
