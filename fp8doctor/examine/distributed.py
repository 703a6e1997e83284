"""Describe torch.distributed and FSDP2's shards; starts and sends nothing."""

import math
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

from fp8doctor.examine.walk import Place, Tree
from fp8doctor.facts import Distributed
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.looking import Ancestor, class_name, lineage, parameters_of, read
from fp8doctor.stacks.transformer_engine import amax_group

Wrapper = Literal["DDP", "FSDP1", "FSDP2"]

WRAPPERS: dict[Ancestor, Wrapper] = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "DDP",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "FSDP1",
}


def examine_distributed(tree: Tree) -> Distributed | None:
    """Describe process group and sharding; None if torch.distributed is off."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    sharded = {
        place.name: shards for place in tree.places if (shards := pieces(fsdp2_weight(place))) is not None
    }
    kind, at = wrapper(tree) or (None, None)
    groups = [amax_group(place.module) for place in tree.places]
    config = torch_private.config()
    backend = None
    with suppress(RuntimeError, ValueError):  # nothing is sent
        backend = str(torch.distributed.get_backend())
    return Distributed(
        world_size=torch.distributed.get_world_size(),
        fsdp2_linears=tuple(sharded),
        shards=max(sharded.values(), default=None),
        backend=backend,
        wrapper=kind,
        wrapper_at=at,
        amax_ranks=max((torch.distributed.get_world_size(each) for on, each in groups if on), default=None),
        optimize_ddp=None if config is None else config.optimize_ddp in (True, "ddp_optimizer"),
    )


def wrapper(tree: Tree) -> tuple[Wrapper, str] | None:
    """Return the data-parallel wrapper (``replicate`` leaves none) and its module."""
    for place in tree.places:
        for each in place.modules:
            for known in WRAPPERS.keys() & {*lineage(type(each))}:
                return WRAPPERS[known], place.name
        if is_fsdp2(place):
            return "FSDP2", place.name
    return None


def fsdp2_weight(place: Place) -> Tensor | None:
    """Return a weight with two or more dimensions at or below ``fully_shard``."""
    weight = parameters_of(place.module).get("weight")
    return weight if weight is not None and weight.ndim > 1 and any(map(is_fsdp2, place.upwards())) else None


def is_fsdp2(place: Place) -> bool:
    """Tell if ``fully_shard`` was called on this module, whose class it replaces."""
    return any(
        base.__name__ == "FSDPModule" and str(base.__module__).startswith(torch_private.FSDP2)
        for base in type(place.module).__mro__
    )


def gathered_as(place: Place) -> str | None:
    """Return the dtype of FSDP's weights in the forward, by the nearest shard."""
    for at in place.upwards():
        sharded = is_fsdp2(at)
        policies = [read(each, "mixed_precision") for each in at.wrappers]
        policies += [torch_private.fsdp2_policy(at.module)] if sharded else []
        dtype = next(filter(None, (read(policy, "param_dtype") for policy in policies)), None)
        if dtype is not None or sharded:
            return None if dtype is None else str(dtype).removeprefix("torch.")
    return None


def tensor_parallel(place: Place, weight: Tensor) -> tuple[int, int]:
    """Return over how many processes tensor parallelism divides a 2-D weight's rows and columns.

    Below ``fully_shard`` its part of the mesh has "tp" in its name, as in torchtitan; the rest is FSDP's.
    """
    divided = [1, 1]
    if weight.ndim != 2 or pieces(weight) is None:
        return 1, 1
    managed = any(map(is_fsdp2, place.upwards()))
    mesh = weight.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for i, placement in enumerate(weight.placements):  # type: ignore[attr-defined]
        if placement.is_shard() and (not managed or "tp" in names[i]):
            divided[placement.dim] *= mesh.size(i)
    return divided[0], divided[1]


def pieces(weight: Tensor | None) -> int | None:
    """Count a DTensor's pieces; None for a tensor that FSDP2 ignores."""
    if weight is None or not class_name(type(weight)).startswith("torch.distributed."):
        return None
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    count: int = math.prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard())
    return count
