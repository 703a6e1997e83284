"""FP8 layers that users wrote: nanochat's, DeepSeek-V3's, modded-nanogpt's, and what only sounds like one.

The first three are shortened stand-ins with the calls of their source: repository, commit, path and line
stand in their docstrings, nanochat's commit in research/recipes/README.md.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8doctor import inspect_model
from fp8doctor.facts import Linear
from fp8doctor.stacks import NoCounterpart, bf16_counterpart
from research.recipes.in_torchao import Float8Linear
from tests.examine.models import network

kernel = ModuleType("kernel")


def act_quant(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError(block_size)


kernel.act_quant = act_quant  # type: ignore[attr-defined]
kernel.fp8_gemm = act_quant  # type: ignore[attr-defined]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """What a weight of one byte is multiplied by where ``gemm_impl`` is fp8.

    deepseek-ai/DeepSeek-V3, 9b4e9788e4a3a731f7567338ed15d3ec549ce03b, inference/model.py:131.
    """
    if weight.element_size() > 1:
        return functional.linear(x, weight)
    x, scale = kernel.act_quant(x, 128)
    return kernel.fp8_gemm(x, scale, weight)  # type: ignore[attr-defined]


class DeepSeekLinear(nn.Module):
    """Its Linear, which derives from no nn.Linear (line 166 there); the scales are left out."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class CastedLinear(nn.Linear):
    """The operator is called by its name in torch.ops; its scales are left out.

    KellerJordan/modded-nanogpt, e7a55f17e08556c2ec6d1fbc4e16a54621893089, train_gpt.py:916. The next
    commit has another class in its place, whose weight lies the other way.
    """

    def __init__(self, in_features: int, out_features: int, use_fp8: bool) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.use_fp8 = use_fp8

    def forward(self, x: Tensor) -> Tensor:
        if self.use_fp8 and self.training:
            out: Tensor = torch.ops.nanogpt.mm(x.flatten(0, -2), self.weight)[0]
            return out
        return functional.linear(x, self.weight.type_as(x))


@torch.library.custom_op("fp8doctor_strangers::mm", mutates_args=())
def mm_op(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones((), device=x.device)
    return torch._scaled_mm(x.to(torch.float8_e4m3fn), weight.t(), one, one, out_dtype=torch.bfloat16)


class OverOperator(nn.Linear):
    """A forward that calls an operator of its own, which torch keeps in an object."""

    def forward(self, x: Tensor) -> Tensor:
        return mm_op(x, self.weight.to(torch.float8_e4m3fn))


class NoLinear(DeepSeekLinear):
    forward = OverOperator.forward  # type: ignore[assignment]


class FP8Linear(nn.Linear):
    """A class that says so, and whose code calls what cannot be looked into."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.somebody.multiply(x, self.weight)  # type: ignore[no-any-return]


class Quanto(nn.Linear):
    """Says what it quantizes to, as quanto 0.2.7 before ``freeze`` (``optimum/quanto/nn/qmodule.py``)."""

    weight_qtype = type("qtype", (), {"name": "qfloat8_e4m3fn"})()

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight)


class Ordinary(nn.Linear):
    """Nothing of FP8 but a setting that is not its own."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


def only(module: nn.Module) -> Linear:
    (found,) = network(nn.Sequential(module)).linears
    return found


@pytest.mark.parametrize(
    ("module", "use", "gemm"),
    [
        (lambda: Float8Linear(64, 32, bias=False), "training", "torch._scaled_mm"),
        (lambda: OverOperator(64, 32), "training", "torch._scaled_mm"),
        (lambda: DeepSeekLinear(64, 32), "unknown", "fp8_gemm"),
        (lambda: CastedLinear(64, 32, True), "unknown", None),
        (lambda: Quanto(64, 32), "unknown", None),
    ],
    ids=["nanochat", "operator", "deepseek", "modded-nanogpt", "quanto"],
)
def test_layers_that_users_wrote(module: Any, use: str, gemm: str | None) -> None:
    found = only(module())
    assert (found.stack, found.use, found.features["gemm"]) == ("own", use, gemm)
    assert (found.in_features, found.out_features, found.recipe) == (64, 32, None)


@pytest.mark.parametrize("module", [lambda: CastedLinear(64, 32, False), lambda: Ordinary(64, 32)])
def test_layers_without_fp8_stay_ordinary(module: Any) -> None:
    found = only(module())
    assert (found.stack, found.use) == ("torch", "none")


def test_the_twin_multiplies_the_same_weights_in_bf16() -> None:
    layer = Float8Linear(64, 32, bias=False)
    twin: Any = bf16_counterpart(layer, compiled=False)
    assert twin.weight is layer.weight
    x = torch.randn(4, 64)
    assert torch.equal(twin(x), functional.linear(x.bfloat16(), layer.weight.bfloat16()))
    with pytest.raises(NoCounterpart, match="NoLinear is a class of the user's own"):
        bf16_counterpart(NoLinear(64, 32), compiled=False)


def told(module: nn.Module) -> Any:
    return inspect_model(nn.Sequential(module, nn.Linear(32, 32)), torch.zeros(48, 64), trial=False)


def test_the_verdict_never_denies_fp8() -> None:
    by_code, by_name = told(Float8Linear(64, 32, bias=False)), told(FP8Linear(64, 32))
    assert (by_code.verdict.status, by_code.answer.has_fp8) == ("open", True)
    assert (by_name.verdict.status, by_name.answer.has_fp8) == ("open", False)
    assert by_name.answer.state


def flash_attn_fp8_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stands in for FP8 attention, which needs a GPU."""
    return functional.scaled_dot_product_attention(q, k, v)


def fp8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    one = torch.ones(())
    narrow = (x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t())
    return torch._scaled_mm(*narrow, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        return flash_attn_fp8_func(*self.qkv(x).chunk(3, dim=-1))


class Held(nn.Module):
    """Is given its matmul; its weights are in a list, so it is no layer."""

    def __init__(self, matmul: Any = fp8_matmul, use_fp8: bool = True) -> None:
        super().__init__()
        self.matmul, self.use_fp8 = matmul, use_fp8
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))])

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weights[0]) if self.use_fp8 else x


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (Attention(), ("flash_attn_fp8_func in Attention",)),
        (Held(), ("torch._scaled_mm in Held",)),
        (nn.Sequential(Held(), Held()), ("torch._scaled_mm in Held",)),
        (Held(torch.mm), ()),
        (Held(use_fp8=False), ()),
        (nn.Sequential(nn.Linear(32, 32)), ()),
    ],
    ids=["attention", "held function", "once a class", "another function", "switched off", "plain"],
)
def test_fp8_outside_of_layers(module: nn.Module, calls: tuple[str, ...]) -> None:
    assert network(module).fp8_calls == calls
