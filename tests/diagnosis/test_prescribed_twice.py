"""After a prescription none is left: what one check leaves out of the conversion no other asks for."""

from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor import inspect_model
from tests.checks.models import float8, llama_1b
from tests.examine.models import Block
from tests.looked import looked


class Square(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 4096), nn.Linear(4096, 4096)


@pytest.mark.slow
def test_the_second_prescription_is_empty() -> None:
    with torch.device("meta"):
        beside = {"score": (4096, 16), "frames": (64, 65536), "project": (8192, 64)}
        model: Any = nn.ModuleDict({name: nn.Linear(*sides) for name, sides in beside.items()})
        model["layers"] = nn.ModuleList(Square() for _ in range(8))
        model = convert_to_float8_training(model.bfloat16())
    first = inspect_model(model, trial=False)
    assert "keep-in-bf16" in [step.treatment.name for step in first.prescription]
    model = first.prescription.apply(model)
    assert [step.treatment.name for step in inspect_model(model, trial=False).prescription] == []


def test_fp8_that_would_be_slower_is_not_made_to_run_first() -> None:
    with torch.device("meta"):
        layers = [nn.Linear(768, 768) for _ in range(12)]
        model = convert_to_float8_training(nn.Sequential(*layers, nn.Linear(768, 2)).bfloat16())
        model.compile()
        report = looked(model, torch.empty(16384, 768, dtype=torch.bfloat16), assume_gpu="h100")
    assert report.verdict.status == "step_raises"
    assert [step.treatment.name for step in report.prescription] == ["stay-in-bf16"]


def test_another_recipe_and_a_filter_are_one_conversion() -> None:
    sizes = {"width": 1536, "hidden": 4096, "kv_heads": 2, "num_hidden_layers": 12, "vocab_size": 32000}
    model = torch.compile(float8(llama_1b(**sizes), "rowwise", keep=("lm_head",)))
    tokens = torch.empty((8, 1024), dtype=torch.long, device="meta")
    report = looked(model, {"input_ids": tokens, "labels": tokens}, assume_gpu="h100")
    fixes = {step.treatment.name: step.treatment.code for step in report.prescription}
    assert {*fixes} == {"recipe-tensorwise", "keep-in-bf16"}
    names: dict[str, Any] = {"model": llama_1b(**sizes)}
    for code in fixes.values():
        exec(code, names)
    converted = [each for each in names["model"].modules() if isinstance(each, Float8Linear)]
    assert len(converted) == 12 * 5
    assert {each.config.cast_config_input.scaling_granularity.name for each in converted} == {"TENSORWISE"}
