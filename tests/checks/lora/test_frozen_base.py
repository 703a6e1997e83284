"""LORA004 on real torchao and PEFT models: what a frozen weight leaves to gain, and that torchao computes its
gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import convert_to_float8_training

from fp8doctor import load_report
from fp8doctor.checks.lora.frozen_base import frozen_base
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, NotApplicable
from tests.checks.arms import ran, timed
from tests.patients.record import HERE
from tests.stand_ins import transformer_engine

Look = Callable[..., Facts]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def in_fp8() -> nn.Module:
    return convert_to_float8_training(Decoder().bfloat16())


def with_lora() -> nn.Module:
    return get_peft_model(in_fp8(), LoraConfig(r=16, target_modules=["up", "down"]))


ARMS = ran("as_is", 135.7), ran("bf16_compiled", 143.6)


def test_a_frozen_base(look: Look) -> None:
    finding = frozen_base(timed(look(with_lora(), tokens=4096), *ARMS))
    assert isinstance(finding, Finding)
    assert finding.title == "4 of 4 FP8 layers are frozen: each has two matmuls for FP8, not three"
    assert finding.evidence["speedup"] == pytest.approx(143.6 / 135.7)
    saved, casts = finding.evidence["modelled_gemms_saved_ms"], finding.evidence["modelled_weight_casts_ms"]
    assert isinstance(saved, float)
    assert isinstance(casts, float)
    assert f"save {saved:.1f} ms/step" in finding.explanation
    assert f"again costs {casts:.1f} ms" in finding.explanation


def test_a_speed_that_the_timing_does_not_tell_is_not_told(look: Look) -> None:
    noise = msgspec.structs.replace(ARMS[0], rounds_ms=(125.0, 130.0, 135.0, 136.4, 160.0, 170.0))
    told, noisy = (
        frozen_base(timed(look(with_lora(), tokens=4096), as_is, ARMS[1])) for as_is in (ARMS[0], noise)
    )
    assert isinstance(told, Finding)
    assert isinstance(noisy, Finding)
    assert "FP8 as it is is at 1.06x of the best BF16" in told.explanation
    assert "of the best BF16" not in noisy.explanation


def test_more_tokens_share_one_cast(look: Look) -> None:
    few, many = (frozen_base(timed(look(with_lora(), tokens=tokens), *ARMS)) for tokens in (4096, 65536))
    assert isinstance(few, Finding)
    assert isinstance(many, Finding)
    assert many.evidence["modelled_gemms_saved_ms"] > few.evidence["modelled_gemms_saved_ms"]  # type: ignore[operator]
    assert many.evidence["modelled_weight_casts_ms"] == few.evidence["modelled_weight_casts_ms"]


def test_compiling_takes_the_third_gemm_out(look: Look) -> None:
    model = with_lora()
    eager = frozen_base(timed(look(model, tokens=4096), *ARMS))
    assert isinstance(eager, Finding)
    assert "still computes the weight gradients" in eager.explanation
    assert eager.treatment is not None
    exec(eager.treatment.code, {"model": model})
    compiled = frozen_base(timed(look(model, tokens=4096), *ARMS))
    assert isinstance(compiled, Finding)
    assert "weight gradients" not in compiled.explanation
    assert compiled.treatment is None


class CountGemms(TorchDispatchMode):
    """Multiplications of matrices, in FP8 or not: torchao's tensors take theirs from ``aten.mm`` too."""

    seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.seen += function is torch.ops.aten.mm.default
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("convert", "trained", "gemms"), [(False, True, 3), (False, False, 2), (True, True, 3), (True, False, 3)]
)
def test_torchao_computes_the_gradient_of_a_frozen_weight(convert: bool, trained: bool, gemms: int) -> None:
    layer = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16().requires_grad_(trained)
    if convert:
        convert_to_float8_training(layer)
    with CountGemms() as count:
        layer(torch.ones(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert count.seen == gemms


def test_a_trained_model_is_left_alone(look: Look) -> None:
    assert frozen_base(timed(look(in_fp8(), tokens=4096), *ARMS)) == NotApplicable(
        reason="no LoRA, and no frozen FP8 layer"
    )


def test_a_frozen_base_in_bf16_is_no_matter_of_fp8(look: Look) -> None:
    lora = get_peft_model(Decoder().bfloat16(), LoraConfig(r=16, target_modules=["up", "down"]))
    assert isinstance(frozen_base(timed(look(lora, tokens=4096), *ARMS)), NotApplicable)


def test_transformer_engine_can_store_fp8_weights(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer_engine.install(monkeypatch)
    model = nn.Sequential(transformer_engine.Linear(256, 512, bias=False).requires_grad_(False))
    finding = frozen_base(timed(look(model, tokens=4096), *ARMS))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert "quantized_model_init" in finding.treatment.code
    model[0].primary_weights_in_fp8 = True  # what that context leaves on a module
    assert frozen_base(timed(look(model, tokens=4096), *ARMS)) is None


def test_the_lora_that_was_recorded() -> None:
    report = load_report(HERE / "recorded" / "h200-lora.json.gz")
    finding = next(each for each in report.findings if each.code == "LORA004")
    assert finding.evidence["frozen_linears"] == 112
    assert not any("LORA004" in step.mends for step in report.prescription), "its cure is that of its cause"
    assert finding.evidence["speedup"] is None, (
        "the prescription holds BF16 adapters, which would help BF16 too"
    )
