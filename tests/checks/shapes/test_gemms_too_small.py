"""SHP002 on real converted models: which layers are named, and that the printed filter leaves them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from fp8doctor.cost import gpu_spec, mxfp8_experts
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import Facts, LayerShape, Linear, Network, Trial, Workload
from fp8doctor.finding import Finding
from tests.checks.arms import ran
from tests.checks.rules import finding_of, found_by, outcome_of
from tests.stand_ins import transformer_engine as stand_in

Look = Callable[..., Facts]
SMALL, HEAD, ADAPTERS = "gemms-too-small", "vocabulary-in-fp8", "adapters-converted"
TOKENS = 16384


def llama(kv_heads: int = 1, width: int = 2048, hidden: int = 2048, layers: int = 3) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=kv_heads,
        vocab_size=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def float8(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: "head" not in name
    )


def kept(finding: Finding) -> set[str]:
    """The layers that its fix leaves in BF16."""
    return set(finding.treatment.layers)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_narrow_keys_and_values_are_left_out_by_the_printed_filter(recipe: str, look: Look) -> None:
    finding = found_by(SMALL, look(float8(llama(), recipe), tokens=TOKENS))
    assert (finding.severity, finding.evidence["losing_layers"]) == ("warning", 6)
    assert (finding.saving_ms.basis, finding.saving_ms.low > 0) == ("modelled", True)
    assert kept(finding) == {f"model.layers.{i}.self_attn.{kv}_proj" for i in range(3) for kv in "kv"}
    scope: dict[str, Any] = {"model": llama()}
    exec(finding.treatment.code, scope)
    facts = look(scope["model"], tokens=TOKENS)
    assert outcome_of(SMALL, facts) == "silent"
    converted = {linear.name: linear.recipe for linear in facts.network.fp8}
    assert (len(converted), {*converted.values()}, "lm_head" in converted) == (15, {recipe}, False)


def test_ordinary_decoders_are_left_alone(look: Look) -> None:
    assert outcome_of(SMALL, look(float8(llama(8, 2048, 8192)), tokens=TOKENS)) == "silent"
    assert outcome_of(SMALL, look(float8(llama(16, 1024, 4096)), tokens=TOKENS)) == "silent"


def test_if_every_layer_that_runs_loses_bf16_is_the_fix(look: Look) -> None:
    score = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 1)).bfloat16()
    for model in (float8(llama(4, 256, 1024)), convert_to_float8_training(score)):
        treatment = found_by(SMALL, look(model, tokens=TOKENS)).treatment
        assert treatment.name == "stay-in-bf16"


def timed(facts: Facts, *losing: str, kept_ms: float = 97.0) -> Facts:
    """The facts with every layer's shape as a GPU may have timed it, these lose, the others gain; and the
    step without them."""
    timed_alone = {"m": TOKENS, "recipe": "tensorwise", "trained": True, "bf16_ms": 0.13, "casts_ms": 0.06}
    shapes = []
    for each in facts.network.fp8:
        fp8_ms = 0.12 if each.name.endswith(losing) else 0.05
        sides = {"k": each.in_features, "n": each.out_features, "layers": (each.name,), "reason": None}
        shapes.append(LayerShape(**timed_alone, **sides, fp8_ms=fp8_ms))  # type: ignore[arg-type]
    arms = (ran("as_is", 100.0), ran("keep-in-bf16", kept_ms, base="as_is", treatments=("keep-in-bf16",)))
    trial = Trial(
        device="cuda", gpu="NVIDIA H200", shapes=tuple(shapes), arms=arms, reliable=True, reason=None
    )
    return msgspec.structs.replace(facts, trial=trial)


def test_what_was_timed_alone_decides(look: Look) -> None:
    finding = found_by(SMALL, timed(look(float8(llama(8, 1024)), tokens=TOKENS), "q_proj", "o_proj"))
    assert finding.evidence["timed_alone"] is True
    assert kept(finding) == {f"model.layers.{i}.self_attn.{qo}_proj" for i in range(3) for qo in "qo"}
    modelled = look(float8(llama()), tokens=TOKENS)
    assert (outcome_of(SMALL, modelled), outcome_of(SMALL, timed(modelled, "none"))) == ("fires", "silent")


@pytest.mark.parametrize(
    ("kept_ms", "outcome"),
    [(99.8, "fires"), (99.95, "silent"), (100.5, "refuted")],
    ids=["gains", "too little", "costs"],
)
def test_the_whole_step_without_them_decides_last(kept_ms: float, outcome: str, look: Look) -> None:
    """Six layers that lose 0.017 ms each at the least."""
    facts = timed(look(float8(llama(8, 1024)), tokens=TOKENS), "q_proj", "o_proj", kept_ms=kept_ms)
    assert {each.code: each.outcome for each in diagnose(facts).outcomes}["SHP002"] == outcome


SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}


class Routed(nn.Module):
    """Two layers of experts, each with a router that is a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"router": nn.Linear(2048, 64, bias=False), "experts": nn.ModuleList()})
            for _ in range(2)
        )
        self.up = nn.Linear(2048, 8192)


def text(classes: int = 16) -> nn.Module:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=classes, use_cache=False))


def causal() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=32000, use_cache=False))


def on_meta(make: Callable[[], nn.Module], *keep: str) -> nn.Module:
    """The model with all aligned layers in FP8 but these."""
    with torch.device("meta"):
        model = make().bfloat16()
    return convert_to_float8_training(
        model, module_filter_fn=lambda layer, name: layer.out_features % 16 == 0 and name not in keep
    )


@pytest.mark.parametrize(
    ("make", "layers"),
    [(text, {"score"}), (Routed, {"layers.0.router", "layers.1.router"})],
    ids=["text", "router"],
)
def test_narrow_heads_and_routers_are_left_out(
    make: Callable[[], nn.Module], layers: set[str], look: Look
) -> None:
    finding = found_by(SMALL, look(on_meta(make), tokens=8192))
    assert (finding.severity, kept(finding)) == ("warning", layers)
    assert outcome_of(SMALL, look(on_meta(make, *layers), tokens=8192)) == "silent"


def test_a_head_as_wide_as_a_vocabulary_is_information(look: Look) -> None:
    facts = look(on_meta(causal), tokens=8192)
    finding = found_by(HEAD, facts)
    assert (finding.severity, finding.saving_ms, kept(finding)) == ("info", None, {"lm_head"})
    assert finding_of(HEAD, look(on_meta(causal, "lm_head"), tokens=8192)) is None


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def base() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).bfloat16()


def test_adapters_that_were_converted_stay_out_by_the_printed_lines(look: Look) -> None:
    facts = look(convert_to_float8_training(lora(base())), tokens=TOKENS)
    finding = found_by(ADAPTERS, facts)
    assert (finding.severity, finding.evidence["converted_adapters"]) == ("warning", 28)
    model = lora(base())
    exec(finding.treatment.code, {"model": model})
    mended = look(model)
    assert (len(mended.network.fp8), outcome_of(ADAPTERS, mended)) == (15, "silent")
    assert not any("lora" in name for name in kept(found_by(SMALL, facts)))


def test_adapters_that_stay_as_they_are(look: Look) -> None:
    assert outcome_of(ADAPTERS, look(lora(convert_to_float8_training(base())))) == "silent"


def test_adapters_in_transformer_engine(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    te: Any = stand_in.install(monkeypatch, "quantization")
    model = lora(base())
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"] = te.Linear(64, 16, bias=False)
    finding = found_by(ADAPTERS, look(model))
    assert finding.evidence["converted_adapters"] == 1
    assert "get_peft_model" in finding.treatment.code


def experts(rows: int, k: int, n: int, count: int, gpu: str = "B200", **changes: Any) -> Facts:
    layer = Linear(
        name="experts.w1",
        use="training",
        recipe="mxfp8",
        features={},
        in_features=k,
        out_features=n,
        gemms=count,
        requires_grad=True,
        role="experts",
        **{"stack": "transformer_engine"} | changes,
    )
    workload = Workload(batch_source="given", tokens=rows, rows={"experts.w1": (rows,)}, accumulate=1)
    return Facts(assumed_gpu=gpu, network=Network(linears=(layer,)), workload=workload)


@pytest.mark.parametrize(
    ("shape", "published_ms"), [((128_000, 5120, 8192, 2), 39.4876), ((128_000, 5120, 1536, 4), 6.4552)]
)
def test_grouped_gemms_in_bf16_take_about_what_was_published(shape: Any, published_ms: float) -> None:
    facts = experts(*shape, stack="torchao")
    cost = mxfp8_experts(facts.network.linears[0], facts, gpu_spec("B200"))
    assert cost.bf16_ms == pytest.approx(published_ms, rel=0.17)


def test_experts_with_few_rows_are_information() -> None:
    """Qwen3 30B-A3B, slower in MXFP8 (NVIDIA-NeMo/Megatron-Bridge#2842); torchao publishes 1.7x for Llama 4
    and 1.4x for DeepSeek-V3."""
    qwen = experts(32_768, 2048, 1536, 128)
    finding = found_by(SMALL, qwen)
    assert (finding.severity, finding.evidence["rows_of_each"]) == ("info", 256)
    assert outcome_of(SMALL, experts(131_072, 5120, 8192, 8, stack="torchao")) == "not_applicable"
    assert outcome_of(SMALL, experts(32_768, 2048, 1536, 128, gpu="H100")) == "not_applicable"
