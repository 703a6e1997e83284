"""SHP002 on real converted models: which layers are named, and that the printed filter leaves them out."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.analysis.conversion import keep_in_bf16
from fp8doctor.analysis.treatment_table import after
from fp8doctor.facts import Facts, Network, Workload
from fp8doctor.finding import Finding
from fp8doctor.kit import float8 as example_layer
from tests.checks.models import float8, llama_1b
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.examine.models import llama, lora, low_rank
from tests.stand_ins import transformer_engine as stand_in

SMALL, HEAD, ADAPTERS = "gemms-too-small", "vocabulary-in-fp8", "adapters-converted"
TOKENS = 16384


def narrow() -> nn.Module:
    """A decoder whose keys and values have one head."""
    return llama_1b(2048, 2048, 1, num_hidden_layers=3)


def blocks_in_fp8(model: nn.Module, recipe: str = "tensorwise") -> nn.Module:
    return float8(model, recipe, keep=("lm_head",))


def kept(finding: Finding) -> set[str]:
    """The layers that its fix leaves in BF16."""
    return set(finding.treatment.layers)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_narrow_keys_and_values_are_left_out_by_the_printed_filter(recipe: str, look: Look) -> None:
    finding = found_by(SMALL, look(blocks_in_fp8(narrow(), recipe), tokens=TOKENS))
    assert (finding.severity, finding.evidence["losing_layers"]) == ("warning", 6)
    assert (finding.saving_ms.basis, finding.saving_ms.low > 0) == ("modelled", True)
    assert kept(finding) == {f"model.layers.{i}.self_attn.{kv}_proj" for i in range(3) for kv in "kv"}
    scope: dict[str, Any] = {"model": narrow()}
    exec(finding.treatment.code, scope)
    facts = look(scope["model"], tokens=TOKENS)
    assert outcome_of(SMALL, facts) == "silent"
    converted = {linear.name: linear.recipe for linear in facts.network.fp8}
    assert (len(converted), {*converted.values()}, "lm_head" in converted) == (15, {recipe}, False)


def test_ordinary_decoders_are_left_alone(look: Look) -> None:
    for model in (llama_1b(), llama_1b(1024, 4096, 16)):
        assert outcome_of(SMALL, look(blocks_in_fp8(model), tokens=TOKENS)) == "silent"


def test_if_every_layer_that_runs_loses_bf16_is_the_fix(look: Look) -> None:
    score = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)), nn.Linear(256, 1)).bfloat16()
    for model in (blocks_in_fp8(llama_1b(256, 1024, 4)), float8(score)):
        assert fix_of(SMALL, look(model, tokens=TOKENS)).name == "stay-in-bf16"
    no_batch_helps = nn.Sequential(nn.Linear(768, 3072), nn.Linear(3072, 768)).bfloat16()
    assert fix_of(SMALL, look(float8(no_batch_helps), tokens=35)).name == "stay-in-bf16"


def test_rowwise_layers_that_lose_with_the_tokens_of_the_job_are_left_out(look: Look) -> None:
    """kv_b_proj of DeepSeek-V3, which torchao's own filter leaves out too."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7168, 16384), nn.Linear(16384, 512), nn.Linear(512, 32768)).bfloat16()
        converted = float8(model, "rowwise")
    assert "2" in kept(found_by(SMALL, look(converted, tokens=TOKENS)))


def routed() -> nn.Module:
    """Two layers of experts, each with a router that is a Linear."""
    routers = (nn.Linear(2048, 64, bias=False) for _ in range(2))
    layers = nn.ModuleList(nn.ModuleDict({"router": each, "experts": nn.ModuleList()}) for each in routers)
    return nn.ModuleDict({"layers": layers, "up": nn.Linear(2048, 8192)})


def test_narrow_routers_are_left_out(look: Look) -> None:
    with torch.device("meta"):
        converted, again = float8(routed()), routed()
    finding = found_by(SMALL, look(converted, tokens=8192))
    assert (finding.severity, kept(finding)) == ("warning", {"layers.0.router", "layers.1.router"})
    assert outcome_of(SMALL, look(float8(again, keep=finding.treatment.layers), tokens=8192)) == "silent"


def test_a_head_as_wide_as_a_vocabulary_is_information(look: Look) -> None:
    def facts(*keep: str) -> Facts:
        return look(float8(llama_1b(hidden=4096, vocab_size=32000), keep=keep), tokens=8192)

    finding = found_by(HEAD, facts())
    assert (finding.severity, finding.saving_ms, kept(finding)) == ("info", None, {"lm_head"})
    assert finding_of(HEAD, facts("lm_head")) is None


def test_adapters_that_were_converted_stay_out_by_the_printed_lines(look: Look) -> None:
    facts = look(float8(lora(llama().bfloat16())), tokens=TOKENS)
    finding = found_by(ADAPTERS, facts)
    assert (finding.severity, finding.evidence["converted_adapters"]) == ("warning", 28)
    model = lora(llama().bfloat16())
    exec(finding.treatment.code, {"model": model})
    mended = look(model)
    assert (len(mended.network.fp8), outcome_of(ADAPTERS, mended)) == (15, "silent")
    assert not any("lora" in name for name in kept(found_by(SMALL, facts)))
    without = after(facts, [keep_in_bf16([facts.network.fp8[0].name], facts)])
    assert outcome_of(ADAPTERS, without) == "silent", "a job converts once"


def test_adapters_in_transformer_engine(monkeypatch: pytest.MonkeyPatch, look: Look) -> None:
    te: Any = stand_in.install(monkeypatch, "quantization")
    model: Any = lora(llama().bfloat16())
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"] = te.Linear(64, 16, bias=False)
    finding = found_by(ADAPTERS, look(model))
    assert finding.evidence["converted_adapters"] == 1
    assert "get_peft_model" in finding.treatment.code


def experts(rows: int, k: int, n: int, count: int, gpu: str = "B200", stack: Any = "torchao") -> Facts:
    sides = {"in_features": k, "out_features": n, "gemms": count}
    layer = example_layer("experts.w1", stack=stack, recipe="mxfp8", role="experts", **sides)
    workload = Workload(batch_source="given", tokens=rows, rows={"experts.w1": (rows,)}, accumulate=1)
    return Facts(assumed_gpu=gpu, network=Network(linears=(layer,)), workload=workload)


def test_experts_with_few_rows_are_information() -> None:
    """Qwen3 30B-A3B, slower in MXFP8 (NVIDIA-NeMo/Megatron-Bridge#2842); torchao publishes 1.7x for Llama 4
    and 1.4x for DeepSeek-V3."""
    qwen = experts(32_768, 2048, 1536, 128, stack="transformer_engine")
    finding = found_by(SMALL, qwen)
    assert (finding.severity, finding.evidence["rows_of_each"]) == ("info", 256)
    assert outcome_of(SMALL, experts(131_072, 5120, 8192, 8)) == "not_applicable"
    assert outcome_of(SMALL, replace(qwen, assumed_gpu="H100")) == "not_applicable"


def test_adapters_of_other_names_are_kept_out_too(look: Look) -> None:
    def job() -> nn.Module:
        return nn.Sequential(low_rank(nn.Linear(64, 64).bfloat16().requires_grad_(False), "down", "up"))

    facts = look(float8(job()), tokens=TOKENS)
    model = job()
    exec(fix_of(ADAPTERS, facts).code, {"model": model})
    converted = {each.name for each in look(model, tokens=TOKENS).network.fp8}
    assert converted == {"0.org"}
