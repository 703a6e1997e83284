"""MOD005 on the real layers and weights of torchao that emulate, and on the same with the real kernel."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from fp8doctor.checks.engagement.emulated_fp8 import emulated_fp8
from fp8doctor.facts import Facts, Package
from fp8doctor.finding import Finding, NotApplicable
from tests import prototypes

Look = Callable[..., Facts]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False)).bfloat16()


def float8(emulate: bool) -> nn.Module:
    return convert_to_float8_training(mlp(), config=Float8LinearConfig(emulate=emulate))


def mx(emulate: bool) -> nn.Module:
    recipe = "MXFP8_EMULATED_RCEIL" if emulate else "MXFP8_RCEIL"
    model = mlp()
    quantize_(model, prototypes.mxfp8(recipe), filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


@pytest.mark.parametrize(("build", "treatment"), [(float8, "real-fp8-kernel"), (mx, "real-mx-kernel")])
def test_emulation_is_found_and_the_real_kernel_is_the_treatment(
    look: Look, build: Callable[[bool], nn.Module], treatment: str
) -> None:
    finding = emulated_fp8(look(build(True)))
    assert isinstance(finding, Finding)
    assert finding.title == "2 of 2 FP8 layers emulate FP8: 0 (64 x 128) and 2 (128 x 64)"
    assert finding.evidence["flops_share_pct"] == 100.0
    assert finding.treatment is not None
    assert finding.treatment.name == treatment
    assert emulated_fp8(look(build(False))) is None


@pytest.mark.parametrize(("precision", "converts"), [("bf16", False), ("no", False), ("fp8", True)])
def test_the_line_is_of_who_converted(
    look: Look, forget_accelerate: None, precision: str, converts: bool
) -> None:
    from accelerate import Accelerator

    finding = emulated_fp8(look(Accelerator(mixed_precision=precision, cpu=True).prepare(float8(True))))
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert ("AORecipeKwargs" in finding.treatment.code) is converts
    assert ("convert_to_float8_training" in finding.treatment.code) is not converts


@pytest.mark.parametrize(
    ("version", "config"), [("0.16.0", "MXLinearConfig"), ("0.18.0", "MXFP8TrainingOpConfig")]
)
def test_real_mx_kernel_in_the_words_of_the_installed_torchao(look: Look, version: str, config: str) -> None:
    facts = look(mx(emulate=True))
    packages = {**facts.software.packages, "torchao": Package(version=version, imported=True)}
    finding = emulated_fp8(
        msgspec.structs.replace(facts, software=msgspec.structs.replace(facts.software, packages=packages))
    )
    assert isinstance(finding, Finding)
    assert finding.treatment is not None
    assert config in finding.treatment.code


def test_one_of_two(look: Look) -> None:
    model = float8(True)
    model[2] = convert_to_float8_training(nn.Linear(128, 64, dtype=torch.bfloat16))
    finding = emulated_fp8(look(model))
    assert isinstance(finding, Finding)
    assert finding.title == "1 of 2 FP8 layers emulate FP8: 0 (64 x 128)"
    assert finding.evidence["first"] == "0"


def test_without_fp8_there_is_nothing_to_emulate(look: Look) -> None:
    assert isinstance(emulated_fp8(look(mlp())), NotApplicable)
