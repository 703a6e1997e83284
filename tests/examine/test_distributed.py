"""torch.distributed and FSDP2 as facts, on torch's own fake process group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8doctor.examine.distributed import examine_distributed
from fp8doctor.examine.walk import walk
from fp8doctor.facts import Distributed
from tests.checks.distributed.sharded import blocks, processes, shard


@pytest.fixture
def eight() -> Iterator[None]:
    with processes(8):
        yield


def distributed(model: nn.Module) -> Distributed | None:
    return examine_distributed(walk(model))


def test_without_a_process_group() -> None:
    assert distributed(blocks()) is None


def test_with_a_process_group_and_nothing_sharded(eight: None) -> None:
    assert distributed(blocks()) == Distributed(world_size=8, fsdp2_linears=(), shards=None)


def test_everything_sharded(eight: None) -> None:
    assert distributed(shard(blocks())) == Distributed(
        world_size=8, fsdp2_linears=("0.0", "0.2", "1.0", "1.2"), shards=8
    )


def test_only_what_is_below_the_call(eight: None) -> None:
    model = blocks()
    fully_shard(model[1])
    assert distributed(model) == Distributed(world_size=8, fsdp2_linears=("1.0", "1.2"), shards=8)


def test_names_are_those_of_the_layers_behind_wrappers(eight: None) -> None:
    model = torch.compile(shard(blocks()))
    assert distributed(model).fsdp2_linears == ("0.0", "0.2", "1.0", "1.2")


def test_replicas_of_shards_count_the_shards(eight: None) -> None:
    """Hybrid sharding: two replicas, each cut over four processes."""
    from torch.distributed.device_mesh import init_device_mesh

    model = blocks()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    assert distributed(model).shards == 4


@pytest.mark.skipif(
    "ignored_params" not in inspect.signature(fully_shard).parameters,
    reason="torch 2.6 has no fully_shard(ignored_params=)",
)
def test_a_parameter_that_fsdp_was_told_to_ignore(eight: None) -> None:
    model = blocks()
    fully_shard(model, ignored_params={model[0][0].weight})
    assert distributed(model).fsdp2_linears == ("0.2", "1.0", "1.2")
