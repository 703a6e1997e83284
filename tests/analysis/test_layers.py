"""Which layers a converter takes, held to what torchao does to the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers.pytorch_utils import Conv1D

from fp8doctor import inspect_model
from fp8doctor.analysis.layers import EVERY_ROLE, in_its_place, in_python, named, would_be_converted
from fp8doctor.facts.examples import float8


class Mixed(nn.Module):
    """One layer of each kind that a converter may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.odd = nn.Linear(32, 50)
        self.conv = Conv1D(64, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.lm_head = nn.Linear(32, 64)


def said(**widened: Any) -> set[str]:
    linears = inspect_model(Mixed(), trial=False).facts.network.linears
    return {each.name for each in linears if would_be_converted(each, **widened)}


def taken(*left_out: str) -> set[str]:
    def wanted(module: nn.Module, name: str) -> bool:
        assert isinstance(module, nn.Linear)
        return name not in left_out and not (module.in_features % 16 or module.out_features % 16)

    converted = convert_to_float8_training(Mixed(), module_filter_fn=wanted)
    return {name for name, module in converted.named_modules() if isinstance(module, Float8Linear)}


def test_it_is_what_torchao_converts() -> None:
    """But for the output of nn.MultiheadAttention, whose weight is multiplied past the converted layer."""
    assert said() == taken("lm_head", "attention.out_proj") == {"up"}
    assert said(roles=EVERY_ROLE, adapters=True) == taken("attention.out_proj") == {"up", "lm_head"}


@pytest.mark.parametrize(
    ("widened", "added"),
    [
        ({"roles": ("body", "head")}, {"lm_head"}),
        ({"padded": True}, {"odd"}),
        ({"rewritten": True}, {"conv", "attention.in_proj", "attention.out_proj"}),
    ],
)
def test_what_widens_it(widened: dict[str, Any], added: set[str]) -> None:
    assert said(**widened) - said() == added


class OddlyNamed(nn.Module):
    """Names that transformers, timm and users give and that Python does not take as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Sequential(nn.Linear(32, 32)))
        self.add_module("proj-out", nn.Linear(32, 32))
        self.add_module("class", nn.ModuleList([Mixed(), Mixed()]))
        self.dict = nn.ModuleDict({"global": Mixed(), "local": Mixed(), "0": Mixed()})
        self.plain = nn.Module()
        self.plain.add_module("1", nn.ModuleList([nn.ModuleList([nn.Linear(32, 32)])]))
        self.keyed = nn.ModuleDict({"lambda": nn.Linear(32, 32), 'say "it"': nn.Linear(32, 32)})


@pytest.mark.parametrize(
    "build",
    [
        OddlyNamed,
        Mixed,
        lambda: nn.Sequential(Mixed(), Mixed()),
        lambda: nn.DataParallel(OddlyNamed()),
        lambda: nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.ModuleDict({"global": Mixed()})),
    ],
)
def test_every_module_can_be_written_and_put_in_its_place(build: Callable[[], nn.Module]) -> None:
    model = build()
    network = inspect_model(model, trial=False).facts.network
    inside = model.module if isinstance(model, nn.DataParallel) else model
    for name, module in inside.named_modules():
        assert eval(in_python(name, network), {"model": model}) is module
    weight = in_python(f"{network.linears[0].name}.weight", network)
    assert isinstance(eval(weight, {"model": model}), nn.Parameter)
    for name, module in list(inside.named_modules())[1:]:
        made = nn.Identity()
        exec(in_its_place(name, "replaced({})", network), {"model": model, "replaced": lambda old: made})  # noqa: B023
        assert inside.get_submodule(name) is made
        inside.set_submodule(name, module)


@pytest.mark.parametrize(
    ("count", "of", "told"),
    [
        (1, 9, ": head (2048 x 50257)"),
        (2, 2, ": head (2048 x 50257) and head (2048 x 50257)"),
        (3, 9, ", such as head (2048 x 50257)"),
        (3, 3, ""),
    ],
)
def test_a_title_names_one_or_two_layers_with_their_sides(count: int, of: int, told: str) -> None:
    layers = [float8("head", in_features=2048, out_features=50257)] * count
    assert named(layers, of) == told
