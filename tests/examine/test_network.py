"""The module tree as facts, on real models. Every fact is held to a value that nothing but reading it could
give."""

import torch
from torch import nn

from fp8doctor.facts import Linear, recorded
from tests.examine.models import Block, Stacked, by_name, gpt2, llama, network, qwen3_moe
from tests.test_untouched_models import MODELS

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
    assert (facts.wrappers, facts.vocabulary, facts.hidden_size) == ((), 256, 64)
    assert (facts.heads, facts.key_value_heads) == (4, 2)
    layers = [f"model.layers.{i}.{name}" for i in (0, 1) for name in LLAMA_LAYER]
    assert [each.name for each in facts.linears] == [*layers, "lm_head"]
    (blocks,) = facts.blocks
    assert blocks.kind == "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
    assert (blocks.name, blocks.container, blocks.count) == ("model.layers", "list", 2)
    assert (blocks.forward_of_torch, blocks.compiled) == (False, 0)


def sides(layer: Linear) -> tuple[int, int, bool]:
    return layer.in_features, layer.out_features, layer.bias


def test_one_linear_of_llama() -> None:
    layer = by_name(llama())["model.layers.1.mlp.down_proj"]
    assert (layer.kind, layer.stack, layer.use) == ("torch.nn.modules.linear.Linear", "torch", "none")
    assert (layer.recipe, layer.features, layer.engaged, layer.weight_class) == (None, {}, None, None)
    assert (sides(layer), layer.gemms, layer.dtype) == ((128, 64, False), 1, "float32")
    assert (layer.requires_grad, layer.role) == (True, "body")
    assert (layer.adapter, layer.compiled, layer.checkpointed) == (None, None, None)
    assert layer.parameters == 8192
    assert (layer.flops_per_token, layer.flops_share_pct) == (6 * 128 * 64, 100 * 49152 / 540672)


def test_conv1d_of_gpt2_is_transposed() -> None:
    facts = network(gpt2())
    up = facts.linears[2]
    assert (up.name, up.kind) == ("transformer.h.0.mlp.c_fc", "transformers.pytorch_utils.Conv1D")
    assert (up.stack, up.use, sides(up)) == ("torch", "none", (64, 256, True))
    assert up.parameters == 64 * 256 + 256
    assert (facts.vocabulary, facts.hidden_size) == (256, 64)
    assert facts.linears[-1].role == "head"


def test_qwen3_moe() -> None:
    linears = by_name(qwen3_moe())
    names = ("experts.gate_up_proj", "experts.down_proj", "gate")
    up, down, gate = (linears[f"model.layers.0.mlp.{name}"] for name in names)
    assert (up.kind.rpartition(".")[2], up.role, up.gemms) == ("Qwen3MoeExperts", "experts", 8)
    assert (sides(up), sides(down), down.parameters) == ((64, 64, False), (32, 64, False), 8 * 32 * 64)
    assert up.flops_per_token == 6 * 64 * 64 * 2  # two of eight experts
    assert (gate.role, gate.gemms, sides(gate)) == ("router", 1, (64, 8, False))


def test_transposed_experts() -> None:
    experts = type("Llama4TextExperts", (nn.Module,), {})()
    experts.hidden_size, experts.top_k = 64, 1
    experts.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 256))
    experts.down_proj = nn.Parameter(torch.zeros(4, 128, 64))
    experts.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 256))
    assert list(map(sides, network(experts).linears)) == [(64, 256, True), (128, 64, False)]


def test_multihead_attention() -> None:
    cross = nn.MultiheadAttention(64, 4, kdim=32, vdim=16, bias=False)
    linears = by_name(nn.ModuleDict({"attn": nn.MultiheadAttention(64, 4), "cross": cross}))
    assert sides(linears["attn.in_proj"]) == (64, 192, True)
    assert linears["attn.in_proj"].features == linears["attn.out_proj"].features == {"functional": True}
    parts = {"q": 64, "k": 32, "v": 16}
    assert {name: sides(linears[f"cross.{name}_proj"])[0] for name in parts} == parts


def test_blocks_in_a_dictionary() -> None:
    """torchtitan keeps its layers in a ModuleDict."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in range(2)})})
    (blocks,) = network(model).blocks
    assert (blocks.name, blocks.container, blocks.count) == ("layers", "ModuleDict", 2)


def test_a_list_of_lists_has_no_blocks_to_loop_over() -> None:
    assert network(nn.ModuleList(nn.ModuleList([Block(), nn.LayerNorm(64)]) for _ in range(4))).blocks == ()


def test_hooks() -> None:
    model = Stacked()
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: None)
    model.head.register_forward_hook(lambda module, arguments, output: None)
    model.head.register_full_backward_hook(lambda module, given, taken: None)
    assert network(model).hooks == 3


def test_a_module_under_two_names_counts_once() -> None:
    shared = nn.Linear(8, 8, bias=False)
    facts = network(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert (len(facts.linears), facts.parameters, facts.modules) == (1, 64, 3)


def test_frozen_parameters() -> None:
    model = Stacked()
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    facts = network(model)
    assert facts.trainable_parameters == facts.parameters - 100 * 32 - (2 * 32 * 128 + 128 + 32)
    passes = [each.flops_per_token / (2 * each.in_features * each.out_features) for each in facts.linears]
    assert passes == [1, 1, 3, 3, 3, 3, 3]
    assert [each.requires_grad for each in facts.linears][:3] == [False, False, True]


def test_devices_and_dtypes_are_counted_by_elements() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False, device="meta", dtype=torch.float16), nn.BatchNorm1d(8))
    facts = network(model)
    assert facts.devices == ("cpu", "meta")
    assert facts.dtypes == {"float16": 64, "float32": 16}


def test_a_head_with_a_copy_of_the_embedding() -> None:
    model = next(each for each in MODELS if each.model == "T5ForConditionalGeneration").build()
    assert network(model).broken_ties == ()
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = nn.Parameter(head.weight.detach().clone())
    ((first, _),) = network(model).broken_ties
    assert model.get_parameter(first) is head.weight


def test_transformers_4_is_unknown() -> None:
    """A stand-in for 4.x, whose models keep no list of what was tied."""
    model, gaps = llama(), dict[str, str]()
    del model.all_tied_weights_keys
    assert not recorded(network(model, gaps), "broken_ties")
    assert "keeps no list of its tied weights" in gaps["network.broken_ties"]
