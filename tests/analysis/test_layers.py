"""Which layers a converter takes, held to what torchao does to the same model."""

from typing import Any

import pytest
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers.pytorch_utils import Conv1D

from fp8doctor import inspect_model
from fp8doctor.analysis.layers import would_be_converted


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
    assert (
        said(roles=("body", "head", "router", "experts")) == taken("attention.out_proj") == {"up", "lm_head"}
    )


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
