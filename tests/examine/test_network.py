"""The module tree as facts, on real models. Every fact is held to a value that nothing but reading it could
give."""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn

from fp8doctor.facts import Blocks
from tests.examine.models import (
    Block,
    by_name,
    gpt2,
    llama,
    llama_8b,
    network,
    qwen3_moe,
)

LLAMA_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def test_llama() -> None:
    facts = network(llama(dtype=torch.bfloat16).bfloat16())
    assert facts.kind == "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    assert (facts.parameters, facts.trainable_parameters, facts.adapter_parameters) == (106816, 106816, 0)
    assert (facts.dtypes, facts.devices) == ({"bfloat16": 106816}, ("cpu",))
    assert (facts.modules, facts.hooks, facts.float8_parameters) == (33, 0, 0)
    assert (facts.ties, facts.wrappers, facts.vocabulary, facts.hidden_size) == ((), (), 256, 64)
    assert (facts.heads, facts.key_value_heads) == (4, 2)
    assert [each.name for each in facts.linears] == [
        *(f"model.layers.{i}.{name}" for i in (0, 1) for name in LLAMA_LAYER),
        "lm_head",
    ]
    (blocks,) = facts.blocks
    kind = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
    assert blocks == Blocks(
        name="model.layers",
        kind=kind,
        container="list",
        forward_of_torch=False,
        level=0,
        count=2,
        compiled=0,
        checkpointed=0,
    )


def test_one_linear_of_llama() -> None:
    layer = by_name(llama())["model.layers.1.mlp.down_proj"]
    assert (layer.kind, layer.stack, layer.use) == ("torch.nn.modules.linear.Linear", "torch", "none")
    assert (layer.recipe, layer.features, layer.engaged, layer.weight_class) == (None, {}, None, None)
    assert (layer.in_features, layer.out_features, layer.gemms, layer.bias, layer.dtype) == (
        128,
        64,
        1,
        False,
        "float32",
    )
    assert (layer.requires_grad, layer.role, layer.adapter, layer.compiled, layer.checkpointed) == (
        True,
        "body",
        None,
        None,
        None,
    )
    assert layer.parameters == 8192
    assert (layer.flops_per_token, layer.flops_share_pct) == (6 * 128 * 64, 100 * 49152 / 540672)


def test_llama_8b_on_meta() -> None:
    facts = network(llama_8b())
    assert (facts.parameters, facts.devices, len(facts.linears)) == (8_030_261_248, ("meta",), 225)
    head = facts.linears[-1]
    assert (head.name, head.role, head.in_features, head.out_features) == ("lm_head", "head", 4096, 128256)
    assert sum(each.flops_per_token for each in facts.linears) == 6 * (32 * 218_103_808 + 4096 * 128256)
    assert abs(sum(each.flops_share_pct for each in facts.linears) - 100) < 1e-9
    assert [each.role for each in facts.linears].count("head") == 1


def test_conv1d_of_gpt2_is_transposed() -> None:
    facts = network(gpt2())
    up = facts.linears[2]
    assert (up.name, up.kind, up.stack, up.use) == (
        "transformer.h.0.mlp.c_fc",
        "transformers.pytorch_utils.Conv1D",
        "torch",
        "none",
    )
    assert (up.in_features, up.out_features, up.bias, up.parameters) == (64, 256, True, 64 * 256 + 256)
    assert facts.ties == (("transformer.wte.weight", "lm_head.weight"),)
    assert (facts.vocabulary, facts.hidden_size) == (256, 64)
    assert facts.linears[-1].role == "head"


def test_qwen3_moe() -> None:
    linears = by_name(qwen3_moe())
    up, down, gate = (
        linears[f"model.layers.0.mlp.{name}"]
        for name in ("experts.gate_up_proj", "experts.down_proj", "gate")
    )
    assert (up.kind.rpartition(".")[2], up.role, up.gemms, up.in_features, up.out_features) == (
        "Qwen3MoeExperts",
        "experts",
        8,
        64,
        64,
    )
    assert (down.in_features, down.out_features, down.parameters) == (32, 64, 8 * 32 * 64)
    assert up.flops_per_token == 6 * 64 * 64 * 2  # two of eight experts
    assert (gate.role, gate.in_features, gate.out_features, gate.gemms) == ("router", 64, 8, 1)


def test_transposed_experts() -> None:
    kind = type("Llama4TextExperts", (nn.Module,), {})
    experts = kind()
    experts.hidden_size, experts.top_k = 64, 1
    experts.gate_up_proj, experts.down_proj = (
        nn.Parameter(torch.zeros(4, 64, 256)),
        nn.Parameter(torch.zeros(4, 128, 64)),
    )
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 256))
    up, down = network(experts).linears
    assert (up.in_features, up.out_features, up.bias) == (64, 256, True)
    assert (down.in_features, down.out_features, down.bias) == (128, 64, False)


def test_experts_in_a_list() -> None:
    """Mixtral before transformers 5: a ModuleList of experts behind a gate that is an nn.Linear."""
    layer = nn.Module()
    layer.top_k, layer.gate, layer.experts = (
        2,
        nn.Linear(32, 4, bias=False),
        nn.ModuleList(Block() for _ in range(4)),
    )
    facts = network(nn.ModuleDict({"moe": layer}))
    linears = {each.name: each for each in facts.linears}
    assert linears["moe.gate"].role == "router"
    assert linears["moe.experts.3.up"].role == "experts"
    assert linears["moe.experts.3.up"].flops_per_token == 6 * 32 * 128 * 2 / 4
    assert facts.blocks == ()


def test_multihead_attention() -> None:
    linears = by_name(
        nn.ModuleDict(
            {
                "attn": nn.MultiheadAttention(64, 4),
                "cross": nn.MultiheadAttention(64, 4, kdim=32, vdim=16, bias=False),
            }
        )
    )
    fused = linears["attn.in_proj"]
    assert (fused.in_features, fused.out_features, fused.bias, fused.features) == (
        64,
        192,
        True,
        {"functional": True},
    )
    assert linears["attn.out_proj"].features == {"functional": True}
    assert [
        (name, each.in_features, each.bias) for name, each in linears.items() if name.startswith("cross")
    ][:3] == [
        ("cross.q_proj", 64, False),
        ("cross.k_proj", 32, False),
        ("cross.v_proj", 16, False),
    ]
