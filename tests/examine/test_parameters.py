"""The parameters of a model as facts: how many, whose, in which form."""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from tests.examine.models import (
    Block,
    Stacked,
    llama,
    network,
)


def test_tied_embeddings_count_once() -> None:
    facts = network(llama(tie_word_embeddings=True))
    assert facts.parameters == 106816 - 256 * 64
    assert facts.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_a_module_under_two_names_is_a_tie() -> None:
    shared = nn.Linear(8, 8, bias=False)
    facts = network(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert facts.ties == (("a.weight", "b.0.weight"),)
    assert (len(facts.linears), facts.parameters, facts.modules) == (1, 64, 3)


def test_frozen_parameters() -> None:
    model = Stacked()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    facts = network(model)
    assert facts.trainable_parameters == facts.parameters - 100 * 32 - (2 * 32 * 128 + 128 + 32)
    assert [each.flops_per_token / (2 * each.in_features * each.out_features) for each in facts.linears] == [
        1,
        1,
        3,
        3,
        3,
        3,
        3,
    ]
    assert [each.requires_grad for each in facts.linears][:3] == [False, False, True]


def test_devices_and_dtypes_are_counted_by_elements() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False, device="meta", dtype=torch.float16), nn.BatchNorm1d(8))
    facts = network(model)
    assert facts.devices == ("cpu", "meta")
    assert facts.dtypes == {"float16": 64, "float32": 16}


def test_sharded_by_fsdp2() -> None:
    """One process is enough to see FSDP2's classes and its DTensor weights."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(
            *(
                convert_to_float8_training(
                    Block(), config=Float8LinearConfig(enable_fsdp_float8_all_gather=True)
                )
                for _ in range(2)
            )
        )
        for block in model:
            fully_shard(block.up)
            fully_shard(block)
        fully_shard(model)
        facts = network(model)
    finally:
        torch.distributed.destroy_process_group()
    assert (facts.kind, facts.wrappers) == ("torch.nn.modules.container.Sequential", ("FSDPModule",))
    assert (facts.blocks[0].kind, facts.blocks[0].count) == ("tests.examine.models.Block", 2)
    layer = facts.linears[0]
    assert (layer.kind, layer.use, layer.recipe) == (
        "torchao.float8.float8_linear.Float8Linear",
        "training",
        "tensorwise",
    )
    assert layer.weight_class == "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor"


def test_channels_are_those_of_norms_embeddings_and_convolutions() -> None:
    model = nn.Sequential(
        nn.Embedding(90, 5), nn.LayerNorm(11), nn.Conv2d(3, 7, 2), nn.Linear(13, 17), nn.LazyLinear(19)
    )
    assert network(model).channel_widths == (3, 5, 7, 11)
    assert network(nn.Sequential(nn.LazyBatchNorm1d(), nn.LazyConv1d(3, 3))).channel_widths == ()
