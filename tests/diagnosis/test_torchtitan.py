"""Fixes of a model of torchtitan, which quantizes its configuration and takes no line that converts the
model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor import inspect_model
from fp8doctor.report import Report


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(1024, 1024), nn.Linear(1024, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.wq(x) + self.wk(x).mean()


class Llama3Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(each): Block() for each in range(4)})
        self.lm_head = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> Any:
        for each in self.layers.values():
            x = each(x)
        return self.lm_head(x)


class OfTorchtitan(Llama3Model):
    pass


OfTorchtitan.__module__ = "torchtitan.models.llama3.model"


def report(kind: type[nn.Module], word: str = "rowwise") -> Report:
    torch.manual_seed(0)
    model = convert_to_float8_training(
        kind().bfloat16(),
        config=Float8LinearConfig.from_recipe_name(word),
        module_filter_fn=lambda _, name: name != "lm_head",
    )
    batch = torch.zeros(2, 64, 1024, dtype=torch.bfloat16)
    return inspect_model(model, batch, trial=False, assume_gpu="H100")


def codes(found: Report) -> dict[str, str]:
    steps = (*found.findings, *found.prescription)
    return {each.treatment.name: each.treatment.code for each in steps if each.treatment}


def test_no_fix_changes_the_model() -> None:
    plain, titans = codes(report(Llama3Model)), codes(report(OfTorchtitan))
    assert set(plain) == set(titans), "the fixes are the same, and their lines are not"
    assert any(".compile()" in each for each in plain.values())
    for each in titans.values():
        assert "convert_to_float8_training(" not in each
        assert ".compile(" not in each
    assert "--compile.enable" in titans["compile-blocks"]
