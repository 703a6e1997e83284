"""MOD003 on the real classes of transformers and torchao, on a plain float8 parameter, and on healthy
relatives."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

from fp8doctor import load_report
from fp8doctor.checks.engagement.fp8_storage_only import FIRES, fp8_storage_only
from fp8doctor.facts import Facts, Package
from fp8doctor.finding import Finding, NotApplicable
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.RMSNorm(256), nn.Linear(256, 256)).bfloat16()


def huggingface() -> nn.Module:
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=512,
            )
        )
        return replace_with_fp8_linear(
            model, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config()
        )


def test_hugging_face_fp8_linear(look: Look) -> None:
    finding = fp8_storage_only(msgspec.structs.replace(look(huggingface()), assumed_gpu="H100"))
    assert isinstance(finding, Finding)
    assert finding.title == "14 of 15 Linears multiply in FP8 only in the forward"
    assert finding.severity == "warning"
    assert "its backward converts the weight back to BF16" in finding.explanation
    assert finding.evidence["classes"] == ("transformers.integrations.finegrained_fp8.FP8Linear",)
    assert finding.treatment is not None
    assert "AutoModelForCausalLM.from_pretrained(" in finding.treatment.code


@pytest.mark.parametrize(
    ("installed", "unsloth", "severity"),
    [
        ("4.57.3", False, "error"),
        ("5.21.1", False, "error"),
        ("5.21.1", True, "warning"),
        ("5.22.0", False, "warning"),
    ],
)
def test_an_fp8_linear_without_a_backward(look: Look, installed: str, unsloth: bool, severity: str) -> None:
    facts = look(huggingface())
    packages = {"transformers": Package(version=installed, imported=True)}
    packages |= {"unsloth": Package(version="2026.10.9", imported=True)} if unsloth else {}
    software = msgspec.structs.replace(facts.software, packages=packages)
    finding = fp8_storage_only(msgspec.structs.replace(facts, software=software))
    assert isinstance(finding, Finding)
    assert finding.severity == severity
    assert ("its output carries no gradient" in finding.explanation) is (severity == "error")


def test_torchao_weight_only_tensor(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", lambda: None)
    model = mlp()
    quantize_(model, Float8WeightOnlyConfig())
    finding = fp8_storage_only(look(model))
    assert isinstance(finding, Finding)
    assert finding.evidence["stored_linears"] == 2
    assert finding.title == "2 of 2 Linears only store their weights in FP8: 0 (256 x 256) and 2 (256 x 256)"
    assert "dequantize the weight" in finding.explanation


def test_torchao_dynamic_tensor_raises_in_its_backward() -> None:
    layer = msgspec.structs.replace(
        FIRES.network.linears[0], stack="torchao", features={"activations_quantized": True}
    )
    finding = fp8_storage_only(
        msgspec.structs.replace(FIRES, network=msgspec.structs.replace(FIRES.network, linears=(layer,)))
    )
    assert isinstance(finding, Finding)
    assert "derivative for aten::_scaled_mm is not implemented" in finding.explanation


def test_plain_float8_parameter(look: Look) -> None:
    model = mlp()
    model[0].weight = nn.Parameter(model[0].weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    finding = fp8_storage_only(look(model))
    assert isinstance(finding, Finding)
    assert finding.evidence["stored_linears"] == 1
    assert "no FP8 matmul for a plain float8 parameter" in finding.explanation


def test_float8_parameter_outside_any_linear(look: Look) -> None:
    model = mlp()
    model.register_parameter(
        "table", nn.Parameter(torch.zeros(16, 16).to(torch.float8_e4m3fn), requires_grad=False)
    )
    finding = fp8_storage_only(look(model))
    assert isinstance(finding, Finding)
    assert finding.evidence["stored_linears"] == 0
    assert finding.evidence["float8_parameters"] == 1
    assert finding.title == "1 parameter is stored in FP8"
    assert "fp8doctor cannot see whether your own kernel multiplies it in FP8" in finding.explanation
    assert finding.treatment is None, "no Linear is stored in FP8"


@pytest.mark.parametrize(
    ("gpu", "rows", "grown", "fits"),
    [("H100", 64, 1, True), (None, 64, 1, False), ("H100", 63, 1, False), ("H100", 64, 2**24, False)],
)
def test_bf16_weights_are_loaded_only_where_they_fit_and_convert(
    look: Look, gpu: str | None, rows: int, grown: int, fits: bool
) -> None:
    facts = msgspec.structs.replace(look(huggingface()), assumed_gpu=gpu)
    dtypes = {name: count * grown for name, count in facts.network.dtypes.items()}
    network = msgspec.structs.replace(facts.network, dtypes=dtypes)
    by_layer = {each.name: (rows,) for each in network.linears}
    workload = msgspec.structs.replace(facts.workload, rows=by_layer)
    finding = fp8_storage_only(msgspec.structs.replace(facts, network=network, workload=workload))
    assert isinstance(finding, Finding)
    assert (finding.treatment is not None) is fits


def test_a_model_that_is_not_trained_is_only_told(look: Look) -> None:
    model = huggingface().requires_grad_(False)
    finding = fp8_storage_only(look(model))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert finding.treatment is None


def test_treatment_makes_it_silent(look: Look) -> None:
    from torchao.float8 import convert_to_float8_training

    assert fp8_storage_only(look(convert_to_float8_training(mlp()))) is None


def test_bf16_is_no_storage(look: Look) -> None:
    assert isinstance(fp8_storage_only(look(mlp())), NotApplicable)


@pytest.mark.parametrize(
    ("stack", "dtype"), [("bitsandbytes", "uint8"), ("bitsandbytes", "int8"), ("torchao", "int8")]
)
def test_four_and_eight_bits_are_not_this_disease(stack: str, dtype: str) -> None:
    layer = msgspec.structs.replace(FIRES.network.linears[0], stack=stack, dtype=dtype)
    network = msgspec.structs.replace(FIRES.network, linears=(layer,), float8_parameters=0)
    assert not isinstance(fp8_storage_only(msgspec.structs.replace(FIRES, network=network)), Finding)


def test_under_unsloth_the_backward_does_not_raise() -> None:
    facts = load_report(RECORDED / "h200-unsloth_load_in_fp8.json.gz").facts
    finding = fp8_storage_only(facts)
    assert isinstance(finding, Finding)
    assert "under Unsloth its backward converts the weight back" in finding.explanation
    assert "derivative" not in finding.explanation


class Diffusion(nn.Module):
    """A block, and the embedding of a time step, which sees one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embed, self.head = nn.Linear(64, 64), nn.Linear(64, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.time_embed(x[:, 0])[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_lora_on_stored_weights_converts_the_base_alone(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the adapters, nor the conditioning, whose rows the FP8 GEMM of a weight gradient cannot take."""
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    monkeypatch.setattr("torchao.quantization.utils.recommended_inductor_config_setter", lambda: None)

    def adapted(model: nn.Module) -> nn.Module:
        return get_peft_model(model, LoraConfig(r=16, target_modules=r"blocks\.\d+\.\d+"))

    stored = Diffusion().bfloat16()
    quantize_(stored, Float8WeightOnlyConfig())
    facts = look(adapted(stored), tokens=64)
    rows = {each.name: (4,) if "time_embed" in each.name else (64,) for each in facts.network.linears}
    workload = msgspec.structs.replace(facts.workload, rows=rows)
    facts = msgspec.structs.replace(facts, workload=workload, assumed_gpu="H100")
    finding = fp8_storage_only(facts)
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    convert = finding.treatment.code.partition("for i, block in")[0]
    for model in (Diffusion().bfloat16(), adapted(Diffusion().bfloat16())):
        exec(convert, {"model": model, "torch": torch})
        converted = {
            name.removeprefix("base_model.model.").removesuffix(".base_layer")
            for name, each in model.named_modules()
            if type(each).__name__ == "Float8Linear"
        }
        assert converted == {f"blocks.{i}.{j}" for i in range(2) for j in range(2)}
    assert fp8_storage_only(look(model, tokens=64)) is None
    exec(finding.treatment.code, {"model": adapted(Diffusion().bfloat16()), "torch": torch})
