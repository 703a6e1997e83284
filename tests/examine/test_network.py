"""The module tree as facts, on real models. Every fact is held to a value that nothing but reading it could
give."""

from __future__ import annotations

import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from fp8doctor.facts import Blocks, recorded
from tests import prototypes
from tests.examine.models import (
    Block,
    Stacked,
    by_name,
    gpt2,
    llama,
    llama_8b,
    lora,
    mixtral,
    network,
    qwen3_moe,
    vit,
)
from tests.stand_ins.deepspeed_optimizer import partition

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


def test_parameters_that_zero_3_has_taken_away_are_counted_whole() -> None:
    whole, model = network(llama()), llama()
    for each in model.parameters():
        partition(each)
    facts = network(model)
    assert (facts.parameters, facts.dtypes) == (whole.parameters, whole.dtypes)
    assert facts.linears == whole.linears


def test_tied_embeddings_count_once() -> None:
    facts = network(llama(tie_word_embeddings=True))
    assert facts.parameters == 106816 - 256 * 64
    assert facts.ties == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_a_module_under_two_names_is_a_tie() -> None:
    shared = nn.Linear(8, 8, bias=False)
    facts = network(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert facts.ties == (("a.weight", "b.0.weight"),)
    assert (len(facts.linears), facts.parameters, facts.modules) == (1, 64, 3)


def test_a_module_that_holds_its_owner_is_walked_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].owner = model
    assert network(model).ties == ()


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


def test_mixtral() -> None:
    facts = network(mixtral())
    experts = [each for each in facts.linears if each.role == "experts"]
    assert [(each.name, each.in_features, each.out_features, each.gemms) for each in experts[:2]] == [
        ("model.layers.0.mlp.experts.gate_up_proj", 64, 256, 4),
        ("model.layers.0.mlp.experts.down_proj", 128, 64, 4),
    ]


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


def test_experts_that_do_not_say_how_many_a_token_visits() -> None:
    kind, gaps = type("GroupedExperts", (nn.Module,), {}), {}
    experts = kind()
    experts.w1 = nn.Parameter(torch.zeros(4, 64, 32))
    (layer,) = network(experts, gaps).linears
    assert (layer.in_features, layer.out_features) == (32, 64)
    assert not recorded(layer, "flops_per_token")
    assert not recorded(layer, "flops_share_pct")
    assert gaps["network.linears.flops_per_token"] == "w1 does not say how many of its experts a token visits"


def test_convolutions_and_positions_are_no_linears() -> None:
    model = nn.Sequential(nn.Conv1d(16, 16, 3), nn.Conv2d(3, 16, 4))
    embeddings = type("MoeViTEmbeddings", (nn.Module,), {})()
    embeddings.position_embeddings, embeddings.cls_token = (
        nn.Parameter(torch.zeros(2, 17, 64)),
        nn.Parameter(torch.zeros(1, 1, 64)),
    )
    assert network(nn.Sequential(model, embeddings)).linears == ()


def test_vit() -> None:
    facts = network(vit())
    assert (facts.vocabulary, facts.hidden_size) == (None, 64)
    assert (facts.linears[-1].name, facts.linears[-1].role) == ("classifier", "head")
    assert (facts.blocks[0].count, len(facts.linears)) == (2, 13)


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


def test_a_converted_output_projection_that_nothing_calls_does_not_train_in_fp8() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.MultiheadAttention(64, 4)))
    layer = by_name(model)["0.out_proj"]
    assert layer.kind.endswith(".Float8Linear")
    assert layer.use == "none"
    assert layer.features["functional"] is True


def test_lora_on_a_plain_base() -> None:
    facts = network(lora(llama(), modules_to_save=["lm_head"]))
    assert (facts.parameters, facts.trainable_parameters, facts.adapter_parameters) == (155968, 49152, 32768)
    linears = {each.name.removeprefix("base_model.model.model.layers."): each for each in facts.linears}
    base, a = linears["1.self_attn.q_proj.base_layer"], linears["1.self_attn.q_proj.lora_A.default"]
    assert (base.adapter, base.requires_grad, base.flops_per_token) == ("base", False, 2 * 2 * 64 * 64)
    assert (a.adapter, a.requires_grad, a.in_features, a.out_features, a.flops_per_token) == (
        "adapter",
        True,
        64,
        16,
        6 * 64 * 16,
    )
    assert (
        linears["0.self_attn.q_proj.base_layer"].flops_per_token == 2 * 64 * 64
    )  # nothing before it is trained
    assert facts.linears[-1].name == "base_model.model.lm_head.modules_to_save.default"
    assert (facts.linears[-1].role, facts.linears[-1].adapter) == ("head", None)
    assert not any("original_module" in each.name for each in facts.linears)


def test_lora_before_and_after_conversion() -> None:
    def kinds(model: nn.Module) -> set[tuple[str | None, str]]:
        return {
            (each.adapter, each.kind.rpartition(".")[2])
            for each in network(model).linears
            if each.role == "body"
        }

    assert kinds(lora(convert_to_float8_training(llama()))) == {
        ("base", "Float8Linear"),
        ("adapter", "Linear"),
    }
    assert kinds(convert_to_float8_training(lora(llama()))) == {
        ("base", "Float8Linear"),
        ("adapter", "Float8Linear"),
    }


def test_lora_linear_of_torchtune() -> None:
    """A stand-in: torchtune's LoRALinear is no nn.Linear and holds the base weight itself."""
    kind = type("LoRALinear", (nn.Module,), {"__module__": "torchtune.modules.peft.lora"})
    layer = kind()
    layer.weight = nn.Parameter(torch.zeros(64, 32), requires_grad=False)
    layer.lora_a, layer.lora_b = nn.Linear(32, 8, bias=False), nn.Linear(8, 64, bias=False)
    facts = network(nn.Sequential(layer))
    assert [(each.name, each.adapter, each.in_features, each.out_features) for each in facts.linears] == [
        ("0", "base", 32, 64),
        ("0.lora_a", "adapter", 32, 8),
        ("0.lora_b", "adapter", 8, 64),
    ]
    assert facts.adapter_parameters == 32 * 8 + 8 * 64


def test_head_by_vocabulary_by_name_or_not_at_all() -> None:
    assert [each.name for each in network(Stacked()).linears if each.role == "head"] == ["head"]
    named = nn.Sequential()
    named.body, named.score = nn.Linear(8, 8), nn.Linear(8, 2)
    assert [each.role for each in network(named).linears] == ["body", "head"]
    assert [each.role for each in network(nn.Sequential(nn.Linear(8, 8))).linears] == ["body"]


def test_sizes_without_a_configuration() -> None:
    facts = network(Stacked())
    assert (facts.vocabulary, facts.hidden_size) == (100, 32)


def test_converted_llama() -> None:
    model = convert_to_float8_training(
        llama().bfloat16(), module_filter_fn=lambda module, name: name != "lm_head"
    )
    facts = network(model)
    assert [each.use for each in facts.linears] == ["training"] * 14 + ["none"]
    assert facts.linears[-1].flops_share_pct == 100 * 98304 / 540672


def test_converted_experts_of_qwen3_moe() -> None:
    model = qwen3_moe().bfloat16()
    quantize_(model, prototypes.float8(), filter_fn=lambda module, name: name.endswith("experts"))
    layer = by_name(model)["model.layers.0.mlp.experts.gate_up_proj"]
    assert (layer.stack, layer.use, layer.recipe, layer.gemms, layer.role) == (
        "torchao",
        "training",
        "rowwise",
        8,
        "experts",
    )
    assert layer.kind.rpartition(".")[2] == "Qwen3MoeExperts"


def test_compiled_model_covers_all_under_clean_names() -> None:
    model = Stacked()
    facts = network(torch.compile(model))
    assert facts.wrappers == ("OptimizedModule",)
    assert facts.kind == "tests.examine.models.Stacked"
    assert {each.compiled for each in facts.linears} == {""}
    assert facts.linears[0].name == "blocks.0.up"
    assert (facts.blocks[0].name, facts.blocks[0].compiled, facts.modules) == (
        "blocks",
        3,
        network(model).modules,
    )


def test_compiled_blocks_cover_themselves() -> None:
    model = Stacked()
    for block in model.blocks[:2]:
        block.compile()
    model.blocks[1].up.compile()
    linears = by_name(model)
    assert [linears[f"blocks.{i}.up"].compiled for i in range(3)] == ["blocks.0", "blocks.1.up", None]
    assert linears["head"].compiled is None
    assert network(model).blocks[0].compiled == 2


def test_compiled_step_covers_all() -> None:
    step = torch.compile(lambda model, batch: model(batch).mean())
    assert {each.compiled for each in network(Stacked(), training_step=step).linears} == {""}


def test_disabled_module_is_not_covered() -> None:
    model = Stacked()
    model.compile()
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    linears = by_name(model)
    assert [linears[f"blocks.{i}.up"].compiled for i in range(3)] == ["", None, ""]


def test_checkpoint_wrappers() -> None:
    model = Stacked()
    for i in (0, 2):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i], checkpoint_impl=CheckpointImpl.REENTRANT)
    facts = network(model)
    linears = {each.name: each for each in facts.linears}
    assert [linears[f"blocks.{i}.up"].checkpointed for i in range(3)] == ["blocks.0", None, "blocks.2"]
    assert (facts.blocks[0].checkpointed, facts.blocks[0].count) == (2, 3)
    assert facts.blocks[0].kind == "tests.examine.models.Block"


def test_huggingface_checkpointing() -> None:
    model = llama()
    model.activation_checkpointing_enable(every_n_layers=2)
    linears = by_name(model)
    assert linears["model.layers.0.mlp.up_proj"].checkpointed == "model.layers.0"
    assert linears["model.layers.1.mlp.up_proj"].checkpointed is None
    assert network(model).blocks[0].checkpointed == 1


def test_flag_on_the_model_covers_its_blocks() -> None:
    """Models of transformers before 4.53, and remote code today, decide above the list of blocks."""
    model = Stacked()
    model.gradient_checkpointing = True
    linears = by_name(model)
    assert [linears[name].checkpointed for name in ("blocks.0.up", "blocks.2.down", "head")] == [
        "blocks.0",
        "blocks.2",
        None,
    ]


class Calls(Stacked):
    """A user's own checkpointing, which only a run can see."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_a_call_to_checkpoint_leaves_the_cover_unknown() -> None:
    facts = network(Calls())
    assert {recorded(each, "checkpointed") for each in facts.linears} == {False}
    assert not recorded(facts.blocks[0], "checkpointed")


def test_blocks_in_a_dictionary() -> None:
    """torchtitan keeps its layers in a ModuleDict."""
    model = nn.ModuleDict({"layers": nn.ModuleDict({str(i): Block() for i in range(2)})})
    (blocks,) = network(model).blocks
    assert (blocks.name, blocks.container, blocks.count) == ("layers", "ModuleDict", 2)


def test_bare_linears_are_no_blocks() -> None:
    assert network(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).blocks == ()


def test_only_the_outermost_blocks_count() -> None:
    nested = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
    assert [(each.name, each.count) for each in network(nn.Sequential(nested, nn.ReLU())).blocks] == [
        ("0", 2)
    ]


def test_hooks() -> None:
    model = Stacked()
    model.blocks[0].register_forward_pre_hook(lambda module, arguments: None)
    model.head.register_forward_hook(lambda module, arguments, output: None)
    model.head.register_full_backward_hook(lambda module, given, taken: None)
    assert network(model).hooks == 3


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
