"""MOD003 on the real classes of transformers and torchao, a plain float8 parameter, and 4 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchao.dtypes
import torchao.quantization
from msgspec.structs import replace
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from fp8doctor import load_report
from fp8doctor.checks.engagement.fp8_storage_only import FIRES, METHODS
from fp8doctor.facts import Converter, Facts, Package
from fp8doctor.finding import Finding
from tests.checks.environment.live import finding_of, outcome_of
from tests.examine.models import llama
from tests.test_recorded import RECORDED

Look = Callable[..., Facts]


STORED, QUANTIZED = "fp8-storage-only", "quantized-base"


def fp8_storage_only(facts: Facts) -> Finding | None:
    return finding_of(STORED, facts)


def quantized_base(facts: Facts) -> Finding | None:
    return finding_of(QUANTIZED, facts)


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
    finding = fp8_storage_only(replace(look(huggingface()), assumed_gpu="H100"))
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
    software = replace(facts.software, packages=packages)
    finding = fp8_storage_only(replace(facts, software=software))
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
    facts = replace(look(huggingface()), assumed_gpu=gpu)
    dtypes = {name: count * grown for name, count in facts.network.dtypes.items()}
    network = replace(facts.network, dtypes=dtypes)
    by_layer = {each.name: (rows,) for each in network.linears}
    workload = replace(facts.workload, rows=by_layer)
    finding = fp8_storage_only(replace(facts, network=network, workload=workload))
    assert isinstance(finding, Finding)
    assert (finding.treatment is not None) is fits


def test_a_model_that_is_not_trained_is_only_told(look: Look) -> None:
    model = huggingface().requires_grad_(False)
    finding = fp8_storage_only(look(model))
    assert isinstance(finding, Finding)
    assert finding.severity == "info"
    assert finding.treatment is None


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
    workload = replace(facts.workload, rows=rows)
    facts = replace(facts, workload=workload, assumed_gpu="H100")
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


def blocks(quantized: Callable[[nn.Linear], None] | None = None) -> nn.Sequential:
    """Two Linears, the second converted, the first quantized if asked for."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16()
    model[1] = convert_to_float8_training(model[1])
    if quantized:
        quantized(model[0])
    return model


def nf4(linear: nn.Linear) -> None:
    home = torchao.quantization if hasattr(torchao.quantization, "to_nf4") else torchao.dtypes
    linear.weight = nn.Parameter(home.to_nf4(linear.weight.data), requires_grad=False)


def int8(linear: nn.Linear) -> None:
    quantize_(
        linear,
        Int8WeightOnlyConfig(
            set_inductor_config=False,
            **({"version": 2} if "version" in vars(Int8WeightOnlyConfig)["__dataclass_fields__"] else {}),
        ),
    )


INT8 = "Int8Tensor" if hasattr(torchao.quantization, "Int8Tensor") else "AffineQuantizedTensor"
"""The class of the weights, which newer releases have changed."""


@pytest.mark.parametrize(("quantize", "kind"), [(nf4, "NF4Tensor"), (int8, INT8)])
def test_torchao_weights_beside_fp8(look: Look, quantize: Callable[[nn.Linear], None], kind: str) -> None:
    finding = quantized_base(look(blocks(quantize)))
    assert isinstance(finding, Finding)
    assert finding.title == "FP8 training is combined with 1 Linear with quantized weights"
    assert [each.rpartition(".")[2] for each in finding.evidence["classes"]] == [kind]
    assert "stay out of FP8" in finding.explanation


def test_a_quantized_weight_that_was_converted_all_the_same(look: Look) -> None:
    model = convert_to_float8_training(blocks(nf4))
    finding = quantized_base(look(model))
    assert isinstance(finding, Finding)
    assert finding.evidence["converted"] == 1
    with pytest.raises(NotImplementedError, match="NF4Tensor dispatch"):
        model(torch.ones(16, 256, dtype=torch.bfloat16))


def test_treatment_a_bf16_base_makes_it_silent(look: Look) -> None:
    assert quantized_base(look(blocks())) is None
    assert quantized_base(look(convert_to_float8_training(blocks()))) is None


@pytest.mark.parametrize(
    ("method", "fires"),
    [
        ("gptq", True),
        ("bitsandbytes", True),
        ("mxfp4", True),
        ("fp8", False),
        ("torchao", False),
        ("quanto", False),
        (None, False),
    ],
)
def test_the_method_in_a_configuration_of_transformers(
    look: Look, monkeypatch: pytest.MonkeyPatch, method: str | None, fires: bool
) -> None:
    """GPTQ's layers are no nn.Linear; its configuration still tells."""
    from transformers import GPTQConfig

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = llama()
    settings = GPTQConfig(bits=4) if method == "gptq" else {"quant_method": method}
    if method:
        model.config.quantization_config = settings
    facts = look(model)
    assert facts.network.quantization == method
    assert isinstance(quantized_base(facts), Finding) is fires


@pytest.mark.parametrize("saved", [False, True])
def test_a_base_that_was_dequantised_while_it_was_loaded_is_healthy(
    look: Look, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """gpt-oss's MXFP4 as it has to be loaded to be trained."""
    from transformers import Mxfp4Config

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    model = llama()
    settings = Mxfp4Config(dequantize=True)
    model.config.quantization_config = {"dequantize": True, "quant_method": "mxfp4"} if saved else settings
    facts = look(model)
    assert facts.network.quantization is None
    assert not isinstance(quantized_base(facts), Finding)
    settings.dequantize = False
    model.config.quantization_config = settings
    assert isinstance(quantized_base(look(model)), Finding)


def test_methods_are_those_of_transformers() -> None:
    from transformers.utils.quantization_config import QuantizationMethod

    assert set(METHODS) <= {each.value for each in QuantizationMethod}


def test_bitsandbytes_layers() -> None:
    """From facts alone: the library needs a GPU."""
    kind = "bitsandbytes.nn.modules.Linear4bit"
    layer = replace(
        FIRES[1].network.linears[0], kind=kind, stack="bitsandbytes", dtype="uint8", weight_class=None
    )
    finding = quantized_base(replace(FIRES[1], network=replace(FIRES[1].network, linears=(layer,))))
    assert isinstance(finding, Finding)
    assert finding.evidence["classes"] == ("Linear4bit",)


def test_a_conversion_that_found_only_quantized_layers(look: Look) -> None:
    """QLoRA whose filter took nothing: it was told to convert the base."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    int8(model[0])
    facts = look(model)
    asked = Converter(called=True, named=True, replaced=0)
    called = replace(facts, training=replace(facts.training, converter=asked))
    assert outcome_of(QUANTIZED, facts).outcome == "not_applicable"
    finding = quantized_base(called)
    assert isinstance(finding, Finding)
    assert finding.evidence["asked_by"] == "convert_to_float8_training"
