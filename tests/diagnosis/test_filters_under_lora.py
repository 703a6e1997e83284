"""A printed filter leaves the same layers out whether the conversion comes before LoRA or after it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.diagnosis.treatments import convert_all_but, keep_in_bf16
from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q": nn.Linear(32, 32), "up": nn.Linear(32, 64), "gate": nn.Linear(32, 16)})
            for _ in range(2)
        )


def adapted(base: nn.Module) -> PeftModel:
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q", "up"]))


def in_fp8(model: nn.Module) -> set[str]:
    return {
        name.removeprefix("base_model.model.").removesuffix(".base_layer")
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
    }


def facts(whole: bool) -> Facts:
    """Of a model that PEFT wraps whole, or of one into which it put its layers."""
    model = adapted(convert_to_float8_training(Base().bfloat16()))
    return examine(
        Job(model=model if whole else model.base_model.model, target=Target(), workload=Workload())
    )


@pytest.mark.parametrize("whole", [False, True], ids=["injected", "wrapped whole"])
@pytest.mark.parametrize("after", [False, True], ids=["before LoRA", "after LoRA"])
@pytest.mark.parametrize("way", ["keep", "all but"])
def test_it_leaves_the_same_layers_out(whole: bool, after: bool, way: str) -> None:
    seen, root = facts(whole), "base_model.model." if whole else ""
    kept = [f"{root}layers.{i}.q.base_layer" for i in range(2)]
    code = keep_in_bf16(kept, seen).code if way == "keep" else convert_all_but(kept, seen)
    model: nn.Module = Base().bfloat16()
    if after:
        model = adapted(model) if whole else adapted(model).base_model.model
    exec(
        code or "", {"model": model, "convert_to_float8_training": convert_to_float8_training, "torch": torch}
    )
    assert in_fp8(model) == {f"layers.{i}.{each}" for i in range(2) for each in ("up", "gate")}
    assert code is not None
    assert "lora_A" not in code, "its matrices are named together"


@pytest.mark.parametrize("after", [False, True], ids=["before LoRA", "after LoRA"])
def test_a_layer_that_peft_trains_whole_is_left_out_too(after: bool) -> None:
    def saved(base: nn.Module) -> nn.Module:
        return get_peft_model(base, LoraConfig(r=4, target_modules=["q"], modules_to_save=["gate"]))

    seen = examine(Job(model=saved(Base().bfloat16()), target=Target(), workload=Workload()))
    kept = [each.name for each in seen.linears() if ".gate." in each.name]
    model: nn.Module = Base().bfloat16()
    names = {"model": saved(model) if after else model}
    exec(
        keep_in_bf16(kept, seen).code,
        {**names, "convert_to_float8_training": convert_to_float8_training},
    )
    called = {name for name in in_fp8(model) if not name.endswith("original_module")}
    assert not any("gate" in name for name in called)
