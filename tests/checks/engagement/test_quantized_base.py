"""MOD009 on torchao's own quantized tensors, on configurations of transformers, and on relatives that are FP8
or nothing."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
import torchao.dtypes
import torchao.quantization
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from fp8doctor.checks.engagement.quantized_base import FIRES, METHODS, quantized_base
from fp8doctor.facts import Converter, Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.examine.models import llama

Look = Callable[..., Facts]


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


def test_treatment_staying_quantized_without_fp8_makes_it_silent(look: Look) -> None:
    model = blocks(nf4)
    model[1] = nn.Linear(256, 256, bias=False)
    assert isinstance(quantized_base(look(model)), NotApplicable)


@pytest.mark.parametrize(
    ("method", "sick"),
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
    look: Look, monkeypatch: pytest.MonkeyPatch, method: str | None, sick: bool
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
    assert isinstance(quantized_base(facts), Finding) is sick


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
    layer = msgspec.structs.replace(
        FIRES.network.linears[0], kind=kind, stack="bitsandbytes", dtype="uint8", weight_class=None
    )
    finding = quantized_base(
        msgspec.structs.replace(FIRES, network=msgspec.structs.replace(FIRES.network, linears=(layer,)))
    )
    assert isinstance(finding, Finding)
    assert finding.evidence["classes"] == ("Linear4bit",)


def test_stored_fp8_and_fake_quantization_are_not_this_disease() -> None:
    for dtype in ("float8_e4m3fn", "bfloat16"):
        layer = msgspec.structs.replace(
            FIRES.network.linears[0], dtype=dtype, weight_class="torchao.quantization.Float8Tensor"
        )
        assert (
            quantized_base(
                msgspec.structs.replace(
                    FIRES, network=msgspec.structs.replace(FIRES.network, linears=(layer,))
                )
            )
            is None
        )


def test_a_conversion_that_found_only_quantized_layers(look: Look) -> None:
    """QLoRA whose filter took nothing: it was told to convert the base."""
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    int8(model[0])
    facts = look(model)
    asked = Converter(called=True, named=True, replaced=0)
    called = msgspec.structs.replace(facts, training=msgspec.structs.replace(facts.training, converter=asked))
    assert isinstance(quantized_base(facts), NotApplicable)
    finding = quantized_base(called)
    assert isinstance(finding, Finding)
    assert finding.evidence["asked_by"] == "convert_to_float8_training"
