"""Stacks whose weights are stored in low precision and multiplied in 16 bits: transformers' FP8 and
bitsandbytes."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from tests.examine.models import network


def test_finegrained_linear() -> None:
    facts = network(nn.Sequential(FP8Linear(128, 256, block_size=(128, 128))))
    (layer,) = facts.linears
    assert layer.kind == "transformers.integrations.finegrained_fp8.FP8Linear"
    assert (layer.stack, layer.use, layer.recipe) == ("huggingface", "storage", None)
    assert (layer.in_features, layer.out_features, layer.dtype) == (128, 256, "float8_e4m3fn")
    assert facts.float8_parameters == 1
    assert layer.flops_per_token == 2 * 128 * 256 * 2  # no weight gradient, whatever requires_grad says


def test_fbgemm_linear() -> None:
    (layer,) = network(nn.Sequential(FbgemmFp8Linear(128, 256, False))).linears
    assert layer.kind == "transformers.integrations.fbgemm_fp8.FbgemmFp8Linear"
    assert layer.use == "storage"


def test_finegrained_experts() -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    up, down = network(nn.ModuleDict({"experts": FP8Experts(config, block_size=(64, 64))})).linears
    assert (up.name, up.role, up.gemms) == ("experts.gate_up_proj", "experts", 4)
    assert (up.stack, up.use) == ("huggingface", "storage")
    assert (up.in_features, up.out_features) == (64, 256)
    assert (down.in_features, down.out_features) == (128, 64)


@pytest.mark.parametrize(("name", "rows"), [("Linear4bit", 32 * 64 // 2), ("Linear8bitLt", 64)])
def test_bitsandbytes_is_not_fp8(name: str, rows: int) -> None:
    """A stand-in for bitsandbytes' classes: the library needs a GPU to quantize."""
    layer = nn.Linear(32, 64, bias=False)
    layer.__class__ = type(name, (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    layer.weight = nn.Parameter(
        torch.zeros(rows, 1 if name == "Linear4bit" else 32, dtype=torch.uint8), requires_grad=False
    )
    facts = network(nn.Sequential(layer))
    (found,) = facts.linears
    assert found.kind == f"bitsandbytes.nn.modules.{name}"
    assert (found.stack, found.use) == ("bitsandbytes", "storage")
    assert (found.in_features, found.out_features, found.parameters) == (32, 64, 2048)
    assert facts.parameters == 2048


def test_an_odd_layer_costs_no_other() -> None:
    odd, gaps = nn.Linear(32, 64), {}
    odd.weight = nn.Parameter(torch.tensor(1.0))
    facts = network(nn.Sequential(odd, nn.Linear(64, 32)), gaps)
    assert [each.name for each in facts.linears] == ["1"]
    assert gaps["network.linears"].startswith("Linear was left out: IndexError")


def test_a_layer_without_a_shape_is_a_gap() -> None:
    gaps: dict[str, str] = {}
    assert network(nn.Sequential(nn.LazyLinear(8)), gaps).linears == ()
    assert "LazyLinear" in gaps["network.linears"]
