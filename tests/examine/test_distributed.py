"""torch.distributed and FSDP2 as facts, on torch's own fake process group."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8doctor.examine.distributed import examine_distributed
from fp8doctor.examine.walk import walk
from fp8doctor.facts import Distributed
from tests.checks.distributed.sharded import blocks, float8, processes, shard
from tests.examine.models import network
from tests.stand_ins import transformer_engine


@pytest.fixture
def eight() -> Iterator[None]:
    with processes(8):
        yield


def distributed(model: nn.Module) -> Distributed | None:
    return examine_distributed(walk(model))


def test_nothing_sharded(eight: None) -> None:
    facts = distributed(blocks())
    assert (facts.world_size, facts.fsdp2_linears, facts.shards) == (8, (), None)
    assert (facts.backend, facts.wrapper, facts.amax_ranks) == ("fake", None, None)


def test_everything_sharded(eight: None) -> None:
    model = shard(float8(all_gather=True))
    facts = distributed(model)
    assert (facts.fsdp2_linears, facts.shards) == (("0.0", "0.2", "1.0", "1.2"), 8)
    assert facts.wrapper == "FSDP2"
    seen = network(model)
    assert (seen.kind, seen.wrappers) == ("torch.nn.modules.container.Sequential", ("FSDPModule",))
    assert seen.blocks[0].kind == "torch.nn.modules.container.Sequential"
    assert seen.linears[0].kind == "torchao.float8.float8_linear.Float8Linear"
    assert seen.linears[0].weight_class == "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"


def test_without_a_process_group() -> None:
    assert distributed(blocks()) is None


def test_ddp_and_fsdp1(eight: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    assert distributed(torch.compile(nn.parallel.DistributedDataParallel(blocks()))).wrapper == "DDP"
    sharded = FullyShardedDataParallel(blocks(), device_id=torch.device("cpu"), use_orig_params=True)
    assert distributed(sharded).wrapper == "FSDP1"
    assert distributed(sharded).wrapper_at == ""


def test_whether_dynamo_cuts_at_ddps_buckets(eight: None) -> None:
    import torch._dynamo

    assert distributed(blocks()).optimize_ddp is True
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert distributed(blocks()).optimize_ddp is False


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


def test_tensor_parallelism_leaves_each_process_a_part_of_a_layer(eight: None) -> None:
    """Alone, and below FSDP2, whose part of the mesh divides storage and no matmul."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    whole = [(each.in_features, each.out_features) for each in network(blocks()).linears[:2]]
    (up_in, up_out), (down_in, down_out) = whole
    for model in (blocks(), float8(all_gather=False)):
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
        parts = [(each.in_features, each.out_features) for each in network(model).linears[:2]]
        assert parts == [(up_in, up_out // 4), (down_in // 4, down_out)]
        fully_shard(model, mesh=mesh["dp"])
        assert [(each.in_features, each.out_features) for each in network(model).linears[:2]] == parts


def test_fsdp1_flattens_weights_and_not_their_sides(eight: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has a flat part of each weight, maybe an empty one; only some modules keep their sides."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    te = transformer_engine.install(monkeypatch)

    def sharded(layer: nn.Module) -> Any:
        model = nn.Sequential(layer, nn.Linear(64, 64))
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)

    seen = network(sharded(te.Linear(64, 256, bias=False))).linears[0]
    assert (seen.stack, seen.in_features, seen.out_features, seen.bias) == (
        "transformer_engine",
        64,
        256,
        False,
    )
    gaps: dict[str, str] = {}
    kinds = [each.kind for each in network(sharded(te.LayerNormMLP(64, 256)), gaps).linears]
    assert kinds == ["torch.nn.modules.linear.Linear"]
    assert "LayerNormMLP" in gaps["network.linears"]


def test_a_frozen_layer_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that trains; before train() every layer of a loaded model is in eval mode."""
    te = transformer_engine.install(monkeypatch)
    model = nn.Sequential(te.Linear(64, 64), te.Linear(64, 64))
    model[0].eval()
    assert [each.features.get("in_eval") for each in network(model).linears] == [True, None]
    assert [each.features.get("in_eval") for each in network(model.eval()).linears] == [None, None]
