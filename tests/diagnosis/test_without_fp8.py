"""What a job without FP8 is told before anything was timed: in fp32, and without a layer that FP8 takes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import Trainer, TrainingArguments

from fp8doctor import Report, inspect_model
from tests.examine.models import gpt2, llama

AUTOCAST = "autocast-bf16"


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.float32) for _ in range(2)))


def report_of(model: nn.Module, rows: int = 256, **options: object) -> Report:
    batch = torch.zeros(rows, model[0].in_features, dtype=model[0].weight.dtype)
    return inspect_model(model, batch, trial=False, assume_gpu="H100", **options)  # type: ignore[arg-type]


def names(report: Report) -> list[str]:
    return [step.treatment.name for step in report.prescription]


@pytest.mark.parametrize(
    ("width", "more"),
    [(4096, ["convert-tensorwise", "compile-model"]), (64, [])],
    ids=["FP8 wins", "it loses"],
)
def test_fp32_is_left_before_anything_else(width: int, more: list[str]) -> None:
    report = report_of(mlp(width), rows=8192)
    assert names(report) == [AUTOCAST, *more]


@pytest.mark.parametrize("model", [mlp(64).bfloat16(), mlp(64)], ids=["BF16 weights", "autocast"])
def test_bf16_is_not_left(model: nn.Module) -> None:
    in_fp32 = model[0].weight.dtype is torch.float32
    report = report_of(model, autocast=torch.bfloat16 if in_fp32 else None)
    assert AUTOCAST not in names(report)


def test_fp8_in_a_frozen_model_is_not_engaged() -> None:
    report = report_of(convert_to_float8_training(mlp(64).bfloat16()).requires_grad_(False), select="cmp")
    assert (report.verdict.status, names(report)) == ("fp8_not_engaged", [])


@pytest.mark.usefixtures("forget_accelerate")
@pytest.mark.parametrize(("bf16", "told"), [(False, ["TrainingArguments(..., bf16=True)"]), (True, [])])
def test_a_trainer_without_mixed_precision_is_told_its_argument(
    bf16: bool, told: list[str], tmp_path: Path
) -> None:
    arguments = TrainingArguments(str(tmp_path), bf16=bf16, use_cpu=True, report_to=[])
    trainer = Trainer(llama(), arguments)
    trainer.create_optimizer()
    report = inspect_model(trainer, trial=False, assume_gpu="H100")
    fixes = {step.treatment.name: step.treatment.code for step in report.prescription}
    assert [fixes[name].splitlines()[-1] for name in fixes if name == AUTOCAST] == told


def test_conv1d_is_to_be_rewritten_before_anything_says_that_fp8_takes_nothing() -> None:
    report = inspect_model(gpt2().bfloat16(), trial=False, assume_gpu="H100")
    assert names(report) == ["conv1d-to-linear"]
    assert report.verdict.open
    assert names(inspect_model(gpt2().bfloat16(), trial=False, assume_gpu="A100")) == []


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 64, 8, 8), nn.Conv2d(64, 64, 3, padding=1), nn.AvgPool2d(8))
        self.append(nn.Flatten())
        self.append(nn.Linear(64, 10))


def test_a_model_that_a_conversion_leaves_alone_stays_in_bf16() -> None:
    model = Convolutions().bfloat16()
    images = torch.zeros(2, 3, 64, 64, dtype=torch.bfloat16)
    report = inspect_model(model, images, trial=False, assume_gpu="H100")
    assert (report.verdict.status, report.answer.takes_no_fp8) == ("no_fp8", True)
    assert report.next is None
