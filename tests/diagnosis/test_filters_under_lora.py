"""A printed filter leaves the same layers out whether the conversion comes before wrapping or after it."""

import re
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.analysis.conversion import NO_ADAPTER, conversion, keep_in_bf16
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
        re.sub(
            r"(?<![^.])(_orig_mod|module|base_model\.model|_checkpoint_wrapped_module)\.", "", name
        ).removesuffix(".base_layer")
        for name, layer in model.named_modules()
        if isinstance(layer, Float8Linear)
    }


def facts(model: nn.Module) -> Facts:
    return examine(Job(model=model, target=Target(), workload=Workload()))


def by_block(model: nn.Module) -> nn.Module:
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(block)
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "injected": lambda model: adapted(model).base_model.model,
    "LoRA": adapted,
    "compiled": torch.compile,
    "compiled by block": by_block,
    "LoRA of compiled blocks": lambda model: adapted(by_block(model)),
    "data parallel LoRA": lambda model: nn.DataParallel(adapted(model)),
    "compiled data parallel": lambda model: torch.compile(nn.DataParallel(model)),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
@pytest.mark.parametrize("after", [False, True], ids=["before wrapping", "after wrapping"])
@pytest.mark.parametrize("way", ["keep", "all but"])
def test_it_leaves_the_same_layers_out(wrap: Callable[[nn.Module], nn.Module], after: bool, way: str) -> None:
    seen = facts(wrap(convert_to_float8_training(Base().bfloat16())))
    kept = [each.name for each in seen.linears() if ".q" in each.name and "lora_" not in each.name]
    code = keep_in_bf16(kept, seen).code if way == "keep" else conversion(seen, beside=kept)
    model: nn.Module = Base().bfloat16()
    if after:
        model = wrap(model)
    exec(code, {"model": model, "convert_to_float8_training": convert_to_float8_training, "torch": torch})
    assert in_fp8(model) == {f"layers.{i}.{each}" for i in range(2) for each in ("up", "gate")}
    assert "lora_A" not in code, "its matrices are named together"


def test_the_filter_of_few_lines_takes_the_base_and_no_adapter() -> None:
    model = adapted(Base())
    takes = f"{NO_ADAPTER} and not (layer.in_features % 16 or layer.out_features % 16)"
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: eval(takes))
    assert in_fp8(model) == {f"layers.{i}.{name}" for i in range(2) for name in ("q", "up", "gate")}
    assert not [
        name for name, each in model.named_modules() if "lora_" in name and type(each) is Float8Linear
    ]
