"""MOD004 on real conversions that stopped half-way, each with its reason, and on filters that are as they
should be."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.utils import parametrizations
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization import quantize_
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fp8doctor import inspect_model
from fp8doctor.analysis.layers import may_be_taken
from fp8doctor.checks.engagement.partial_conversion import SILENT
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding
from research.complaints import torchtitan_3199
from tests.checks.engagement.accelerated import prepare
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.examine.models import llama_8b

pytestmark = pytest.mark.slow

Look = Callable[..., Facts]

WIDTH = 2048
PARTIAL, EXPERTS_RULE = "partial-conversion", "experts-not-reached"


class Block(nn.Module):
    """A residual block with a narrow Linear between the wide ones, as a gate for each of 12 heads is."""

    def __init__(self, gate: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, gate)
        self.down = nn.Linear(WIDTH, WIDTH)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().bfloat16()


def fired(facts: Facts, reason: str) -> Finding:
    finding = found_by(PARTIAL, facts)
    assert finding.evidence["reasons"] == (reason,)
    assert finding.severity == "warning"
    return finding


def test_accelerate_stops_at_the_first_unaligned_sibling(
    look: Look, monkeypatch: pytest.MonkeyPatch, forget_accelerate: None
) -> None:
    model = Block()
    model, _ = prepare(monkeypatch, model, torch.optim.SGD(model.parameters()))
    finding = fired(look(model), "convert-with-torchao")
    assert finding.title == "Only 50% of the matmul FLOPs are in FP8; 50% more could be"
    assert (finding.evidence["first"], finding.evidence["missing_layers"]) == ("down", 1)
    assert "1.31x now, 1.91x with these layers" in finding.explanation


def test_accelerate_leaves_out_the_first_and_the_last(look: Look, forget_accelerate: None) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import AORecipeKwargs

    def mlp() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    finding = fired(look(Accelerator(mixed_precision="fp8", cpu=True).prepare(mlp())), "own-filter")
    assert finding.evidence["missing_layers"] == 2
    AcceleratorState._reset_state()
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: name != "lm_head")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[recipe])
    assert finding_of(PARTIAL, look(accelerator.prepare(mlp()))) is None


def test_conv1d_beside_a_converted_head(look: Look) -> None:
    """What the lines make of them is tested with MOD001."""
    sizes = {"n_layer": 1, "n_embd": WIDTH, "n_head": 8, "vocab_size": 1024}
    model = on_meta(lambda: GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))
    fired(look(convert_to_float8_training(model)), "conv1d-to-linear")


FEW = {"num_hidden_layers": 1, "vocab_size": 1024}
FOUR = FEW | {"num_local_experts": 4}
EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_experts_per_tok=2, **FOUR)),
    "JetMoe": lambda: JetMoeForCausalLM(JetMoeConfig(hidden_size=4096, **FOUR)),
    "GPT-OSS": lambda: GptOssForCausalLM(GptOssConfig(**FOUR)),
    "Llama 4": lambda: Llama4ForCausalLM(Llama4TextConfig(**FOUR)),
    "Qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=16, moe_intermediate_size=768, **FEW)),
}


def with_experts(name: str) -> nn.Module:
    return convert_to_float8_training(
        on_meta(EXPERTS[name]), module_filter_fn=lambda module, name: name != "lm_head"
    )


@pytest.mark.parametrize("name", ["JetMoe", "GPT-OSS", "Llama 4"])
def test_experts_that_no_line_converts(name: str, look: Look) -> None:
    """JetMoe multiplies one expert after the other, Llama 4 by bmm; those of GPT-OSS lie as [in, out]."""
    treatment = fired(look(with_experts(name)), "experts-by-grouped-gemm").treatment
    assert treatment.kind == "sketch"


def test_experts_are_not_seen(look: Look) -> None:
    model = with_experts("Mixtral")
    finding = fired(look(model), "convert-experts")
    assert finding.treatment.kind == "python"
    exec(finding.treatment.code, {"model": model})
    assert finding_of(PARTIAL, look(model)) is None


def test_experts_are_told_by_their_weights_where_nobody_says_how_many_a_token_visits(look: Look) -> None:
    facts = look(torchtitan_3199.build_model())
    finding = fired(facts, "convert-experts")
    assert "98% more could be" in finding.title
    assert "Linears' weights" in finding.title
    without = tuple(each for each in facts.network.linears if each.role != "experts")
    left_out = tuple(replace(each, use="none", stack="torch") for each in without[:1])
    network = replace(facts.network, linears=(*left_out, *without[1:]))
    assert outcome_of(PARTIAL, replace(facts, network=network)) == "unknown"


def test_the_printed_filter_leaves_out_what_this_model_has_to_leave_out(look: Look) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict(
            {f"up_{i}": nn.Linear(4096, 4096) for i in range(4)} | {"out": nn.Linear(4096, 50)}
        )

    model = convert_to_float8_training(build(), module_filter_fn=lambda module, name: name == "up_0")
    finding = fired(look(model), "convert-the-rest")
    assert finding.treatment is not None
    model = build()
    exec(finding.treatment.code, {"model": model})
    assert [type(each) is nn.Linear for each in model.values()] == [False] * 4 + [True]
    assert finding_of(PARTIAL, look(model)) is None


NAMES = {f"{block}.{layer}" for block in range(3) for layer in ("up", "down")}


def wrapped(model: nn.Module) -> nn.Module:
    for i in (1, 2):
        model[i] = torch.compile(model[i], backend="eager")
    return model


def test_exact_names_behind_a_compiled_wrapper(look: Look) -> None:
    blocks = on_meta(lambda: nn.Sequential(*(Block() for _ in range(3))))
    model = convert_to_float8_training(wrapped(blocks), module_filter_fn=lambda module, name: name in NAMES)
    finding = fired(look(model), "convert-before-compile")
    assert (finding.evidence["first"], finding.evidence["missing_layers"]) == ("1.up", 4)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name.replace("_orig_mod.", "") in NAMES
    )
    assert finding_of(PARTIAL, look(model)) is None


def test_projections_inside_multi_head_attention(look: Look) -> None:
    layer = on_meta(lambda: nn.TransformerEncoderLayer(WIDTH, 16))
    assert (
        fired(look(convert_to_float8_training(layer)), "own-projections").evidence["first"]
        == "self_attn.in_proj"
    )


@pytest.mark.parametrize(("rows", "outcome"), [(35, "silent"), (16384, "fires")])
def test_layers_that_gain_less_than_the_model_can_tell_are_not_missed(rows: int, outcome: str) -> None:
    """Lightning's FP8 example trains on 35 tokens, with which converting more gains nothing."""
    width = 1024 if rows == 35 else 2048
    layer = on_meta(lambda: nn.TransformerEncoderLayer(width, 32, 4 * width, batch_first=True))
    convert_to_float8_training(layer, config=Float8LinearConfig(pad_inner_dim=True))
    batch = torch.empty(1, rows, width, dtype=torch.bfloat16, device="meta")
    report = inspect_model(layer, batch, trial=False, assume_gpu="H100")
    assert next(each.outcome for each in report.outcomes if each.code == "MOD004") == outcome


def test_torchtunes_lora_is_no_linear() -> None:
    """From facts alone: torchtune is not a dependency."""
    converted, other = SILENT.network.linears
    tuned = replace(other, use="none", stack="torch", kind="torchtune.modules.peft.lora.LoRALinear")
    network = replace(SILENT.network, linears=(converted, tuned))
    finding = fired(replace(SILENT, network=network), "convert-before-lora")
    assert finding.evidence["missing_layers"] == 1
    assert "# torchtune's LoRALinear is not nn.Linear: build the model without it" in finding.treatment.code


@pytest.mark.parametrize(("part", "severity"), [("mlp", "info"), ("self_attn", "warning")])
def test_a_filter_of_the_users_own(look: Look, part: str, severity: str) -> None:
    """Leaving out a fifth is a choice and said; leaving out most is a warning."""
    model = convert_to_float8_training(llama_8b(), module_filter_fn=lambda module, name: part in name)
    finding = found_by(PARTIAL, look(model))
    assert (finding.severity, finding.evidence["reasons"]) == (severity, ("convert-the-rest",))
    convert_to_float8_training(model, module_filter_fn=lambda module, name: not name.endswith("lm_head"))
    assert finding_of(PARTIAL, look(model)) is None


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchaos_own_filter_is_sensible(look: Look, recipe: str) -> None:
    """It leaves out k_proj and v_proj of an 8B Llama, and the head by name."""
    utilities = importlib.import_module("torchao.float8.float8_linear_utils")
    own_filter = getattr(utilities, "_auto_filter_for_recipe", None)
    if own_filter is None:
        pytest.skip("this torchao has no filter of its own")
    model = llama_8b()
    convert_to_float8_training(
        model,
        module_filter_fn=own_filter(recipe, ["lm_head"]),
        config=Float8LinearConfig.from_recipe_name(recipe),
    )
    facts = look(model)
    assert {each.name.rpartition(".")[2] for each in facts.network.linears if each.use == "none"} == {
        "k_proj",
        "v_proj",
        "lm_head",
    }
    assert finding_of(PARTIAL, facts) is None


def test_with_few_tokens_no_layer_is_missed(look: Look) -> None:
    blocks = on_meta(lambda: nn.Sequential(*(Block() for _ in range(3))))
    facts = look(
        convert_to_float8_training(blocks, module_filter_fn=lambda module, name: name == "0.up"), tokens=64
    )
    assert finding_of(PARTIAL, facts) is None


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.spectral_norm])
def test_a_computed_weight_is_no_choice_of_a_filter(norm: Callable[..., nn.Module], look: Look) -> None:
    """torchao raises on it, and takes a converted layer whose weight is computed."""
    model = nn.ModuleDict({f"up_{i}": nn.Linear(4096, 4096) for i in range(4)})
    for name in ("up_0", "up_1"):
        norm(model[name])
    with pytest.raises(TypeError, match="cannot assign"):
        convert_to_float8_training(model)
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name in ("up_2", "up_3"))
    facts = look(model)
    fired(facts, "convert-before-parametrizing")
    assert [each.name for each in facts.linears() if may_be_taken(each)] == ["up_0", "up_1"]
    norm(model["up_2"])
    assert [each.use for each in look(model).linears()].count("training") == 2


def with_wrapped_experts(name: str) -> Any:
    model = on_meta(EXPERTS[name])
    experts = {"JetMoe": "ParallelExperts"}.get(name, "Experts")
    quantize_(
        model,
        Float8TrainingOpConfig(),
        filter_fn=lambda module, _: type(module).__name__.endswith(experts),
    )
    return model


@pytest.mark.parametrize(("name", "operator"), [("Llama 4", "bmm"), ("JetMoe", "linear")])
def test_experts_whose_class_has_no_grouped_gemm(name: str, operator: str, look: Look) -> None:
    facts = look(with_wrapped_experts(name))
    finding = found_by(EXPERTS_RULE, facts)
    assert finding.severity == "warning"
    assert finding.evidence["operators"] == (operator,)
    assert finding.treatment.kind == "sketch"
    assert not [linear for linear in facts.network.linears if linear.use == "training"]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_the_line_lets_the_wrapper_see_the_product(implementation: str, look: Look) -> None:
    model = with_wrapped_experts("Mixtral")
    model.set_experts_implementation(implementation)
    finding = found_by(EXPERTS_RULE, look(model))
    assert finding.treatment.kind == "python"
    exec(finding.treatment.code, {"model": model})
    facts = look(model)
    assert outcome_of(EXPERTS_RULE, facts) == "silent"
    assert sum(linear.use == "training" for linear in facts.network.linears) == 2


def test_small_experts_beside_attention_in_fp8_are_told(look: Look) -> None:
    model = convert_to_float8_training(
        on_meta(EXPERTS["Qwen3"]), module_filter_fn=lambda module, name: "attn" in name
    )
    facts = look(model)
    finding = found_by(EXPERTS_RULE, facts)
    assert (finding.severity, finding.evidence["ceiling"]) == ("info", 1.1)
    assert finding.treatment is None
    assert outcome_of(PARTIAL, facts) == "silent"


@pytest.mark.parametrize("vocabulary", [1024, 151936])
def test_where_little_is_left_beside_small_experts_fp8_is_to_be_left_off(vocabulary: int, look: Look) -> None:
    """Whatever the head is: by good custom it is left out."""
    config = Qwen3MoeConfig(num_hidden_layers=1, vocab_size=vocabulary)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "attn" in name)
    finding = found_by(EXPERTS_RULE, look(model, tokens=4096))
    assert finding.severity == "warning"
    assert finding.title.startswith("Experts hold 80% of the matmul FLOPs that FP8 could take")
    assert finding.treatment.name == "stay-in-bf16"
