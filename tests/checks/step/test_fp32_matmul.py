"""STP004: real steps on the CPU with a head in fp32, real PEFT models, and fp32 weights under FP8 layers."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM

from fp8doctor.facts import ArmCut, Facts, KernelGroup, Package, TrainerArguments
from fp8doctor.registry import discover, run, select
from tests.checks.arms import ran, timed
from tests.checks.distributed.sharded import processes
from tests.checks.models import float8, mlp
from tests.checks.rules import Look, finding_of, fix_of, found_by, outcome_of
from tests.checks.step.conftest import families_of, with_arms
from tests.checks.step.profiled import profiled, replaced
from tests.examine.models import StoredLinear, llama, lora, low_rank
from tests.looked import looked

MATMUL, ADAPTERS, PARAMETERS = "fp32-matmul", "fp32-adapters", "fp32-parameters"


@pytest.mark.slow
def test_a_head_in_fp32_is_named(sick: Facts, treated: Facts) -> None:
    finding = found_by(MATMUL, sick)
    assert finding.evidence["gemm_fp32_ms"] == pytest.approx(families_of(sick)["gemm_fp32"])
    assert (finding.evidence["modules"], finding.evidence["fp32_linears"]) == (("head",), 1)
    assert finding.treatment.name == "autocast-bf16"
    assert families_of(treated)["gemm_16bit"] > 0
    assert outcome_of(MATMUL, treated) == "silent"
    facts = replace(treated, training=replace(treated.training, autocast="bfloat16"))
    upcasts, little = (profiled("as_is", 100.0, gemm_fp8=80.0, gemm_fp32=ms) for ms in (3.0, 2.9))
    assert found_by(MATMUL, with_arms(facts, upcasts)).treatment is None
    assert outcome_of(MATMUL, with_arms(facts, little)) == "silent"
    assert outcome_of(MATMUL, with_arms(facts, ran("as_is", 100.0, breakdown=None))) == "unknown"


SOFTMAX, BATCHED, HEAD = (
    KernelGroup(name=name, family=family, operator=operator, count=24, time_ms=ms)
    for name, family, operator, ms in (
        ("triton_red_fused__safe_softmax_add_exp_3", "attention", None, 8.0),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n", "gemm_fp32", "aten::bmm", 13.5),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "gemm_fp32", "aten::mm", 4.5),
    )
)


@pytest.mark.slow
def test_gemms_of_torchs_math_attention_are_not_claimed(treated: Facts) -> None:
    """MEM004 speaks of them: no autocast reaches them. The step is compiled."""

    def compiled(*groups: KernelGroup) -> Facts:
        families: dict[str, float] = defaultdict(float, gemm_fp8=40.0)
        for group in groups:
            families[group.family] += group.time_ms
        arm = profiled("as_is", 100.0, arm={"graphs_run": 24, "cuts": (ArmCut(step_ms=100.0),)}, **families)
        return with_arms(treated, replaced(arm, groups=groups))

    (finding,), _ = run(select(discover(), ["MEM004", "STP004"]), compiled(BATCHED, SOFTMAX))
    assert finding.code == "MEM004"
    assert found_by(MATMUL, compiled(BATCHED, SOFTMAX, HEAD)).evidence["gemm_fp32_ms"] == pytest.approx(4.5)
    assert found_by(MATMUL, compiled(BATCHED)).evidence["gemm_fp32_ms"] == pytest.approx(13.5)


def base(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return llama().to(dtype)


def trained(model: Any) -> Any:
    ids = torch.zeros(1, 16, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    return model


@pytest.mark.parametrize(
    ("build", "given", "severity"),
    [
        (lambda: lora(float8(base(), keep=("lm_head",))), {}, "warning"),
        (lambda: trained(lora(base())), {}, "warning"),
        (lambda: lora(base()), {}, "info"),
        (lambda: lora(float8(base(), keep=("lm_head",))), {"autocast": torch.bfloat16}, "info"),
        (lambda: convert_to_float8_training(lora(base())), {}, "info"),
    ],
    ids=["FP8 base", "a step was seen", "may come under autocast", "autocast", "converted"],
)
def test_adapters_that_peft_left_in_fp32(
    build: Callable[[], nn.Module], given: dict[str, Any], severity: str, look: Look
) -> None:
    model = build()
    finding = found_by(ADAPTERS, look(model, **given))
    assert finding.severity == severity
    assert finding.evidence["fp32_adapters"] == finding.evidence["adapters"] > 0
    if not given:
        exec(finding.treatment.code, {"model": model, "torch": torch})
        assert outcome_of(ADAPTERS, look(model)) == "silent"
        trained(model)
        assert all(each.grad is not None for each in model.parameters() if each.requires_grad)


def test_adapters_that_are_right_or_of_unsloth(look: Look) -> None:
    """Unsloth multiplies them in 16 bits, as h200-unsloth_lora shows."""
    right = look(lora(float8(base(), keep=("lm_head",))).bfloat16())
    assert outcome_of(ADAPTERS, right) == "silent"
    assert outcome_of(ADAPTERS, look(lora(base(torch.float16)))) == "not_applicable"
    facts = look(lora(float8(base(), keep=("lm_head",))))
    packages = {**facts.packages(), "unsloth": Package(version="2026.10.9", imported=True)}
    loaded = replace(facts, software=replace(facts.software, packages=packages))
    assert outcome_of(ADAPTERS, loaded) == "not_applicable"


@pytest.mark.parametrize("names", [("lora_down", "lora_up"), ("A", "B")])
@pytest.mark.parametrize(("grown", "severity"), [(1, "info"), (2**20, "warning")])
def test_large_adapters_in_fp32_matter_under_autocast_too(
    look: Look, names: tuple[str, str], grown: int, severity: str
) -> None:
    model = nn.Sequential(low_rank(StoredLinear(64, 64), *names, dtype=torch.float32))
    facts = look(model, tokens=64, autocast=torch.bfloat16)
    linears = tuple(replace(each, parameters=grown * each.parameters) for each in facts.network.linears)
    finding = found_by("fp32-adapters", replace(facts, network=replace(facts.network, linears=linears)))
    assert finding.severity == severity
    assert finding.treatment is not None
    exec(finding.treatment.code, {"model": model, "torch": torch})
    assert outcome_of("fp32-adapters", look(model, tokens=64)) == "silent"


def in_fp8(dtype: torch.dtype = torch.float32) -> nn.Module:
    return convert_to_float8_training(mlp(dtype=dtype))


def test_a_conversion_in_fp32_and_its_treatment(look: Look) -> None:
    model = in_fp8()
    finding = found_by(PARAMETERS, look(model))
    assert finding.evidence["fp32_linears"] == 2
    exec(finding.treatment.code, {"model": model, "torch": torch})
    facts = look(model)
    assert facts.training.autocast == "bfloat16"
    assert outcome_of(PARAMETERS, facts) == "silent"
    seen: list[torch.dtype] = []
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model(torch.zeros(16, 256)).sum().backward()
    assert seen == [torch.bfloat16]
    facts, trainer = look(in_fp8()), TrainerArguments(kind="trl.SFTConfig", bf16=False)
    facts = replace(facts, training=replace(facts.training, trainer=trainer))
    assert "SFTConfig(..., bf16=True)" in fix_of(PARAMETERS, facts).code


@pytest.mark.parametrize(
    ("model", "given", "outcome"),
    [
        (lambda: in_fp8(torch.bfloat16), {}, "silent"),
        (in_fp8, {"autocast": torch.bfloat16}, "silent"),
        (lambda: nn.Sequential(in_fp8(torch.bfloat16), nn.Linear(16, 16)), {}, "silent"),
        (lambda: mlp(dtype=torch.float32), {}, "not_applicable"),
    ],
    ids=["BF16", "autocast", "a small part", "nobody asked for less"],
)
def test_fp32_weights_that_are_right_or_not_known(
    model: Callable[[], nn.Module], given: dict[str, Any], outcome: str, look: Look
) -> None:
    assert outcome_of(PARAMETERS, look(model(), **given)) == outcome


@pytest.mark.parametrize(("device", "outcome"), [("cuda", "fires"), ("cpu", "not_applicable")])
def test_a_measured_step_in_fp32(device: str, outcome: str, look: Look) -> None:
    facts = timed(look(mlp(dtype=torch.float32)), ran("as_is", 10.0), device=device)
    assert outcome_of(PARAMETERS, facts) == outcome


def test_what_fsdp2_gathers_in_bf16_is_not_computed_in_fp32(look: Look) -> None:
    with processes(1):
        model = in_fp8()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert finding_of(PARAMETERS, look(model)) is None


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_fp32_adapters_have_a_number_without_a_gpu(base: torch.dtype) -> None:
    """It is what the cost model says that the same job without them takes less."""
    with torch.device("meta"):
        config = LlamaConfig(hidden_size=4096, intermediate_size=8192, num_hidden_layers=2, vocab_size=32000)
        model = get_peft_model(LlamaForCausalLM(config).to(base), LoraConfig(r=32, target_modules=["q_proj"]))
    tokens = torch.zeros(8, 1024, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens}
    now = looked(model, batch, assume_gpu="H100")
    found = next((each for each in now.findings if each.name == "fp32-adapters"), None)
    assert (found is not None) == (base == torch.bfloat16)
    if found:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        then = looked(model, batch, assume_gpu="H100")
        less = now.answer.compared.now.ms.value - then.answer.compared.now.ms.value
        assert found.saving_ms.low < less < found.saving_ms.high
        assert "adapters-to-bf16" in [step.treatment.name for step in now.prescription]
        assert "fp32-adapters" not in [each.name for each in then.findings]
