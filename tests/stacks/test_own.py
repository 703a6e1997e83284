"""Layers that users named after FP8, and one that only could be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8doctor import inspect_model
from tests.examine.models import network
from tests.looked import looked


class CastedLinear(nn.Linear):
    """The operator is called by its name in torch.ops; its scales are left out.

    KellerJordan/modded-nanogpt, e7a55f17e08556c2ec6d1fbc4e16a54621893089, train_gpt.py:916.
    """

    def __init__(self, in_features: int, out_features: int, use_fp8: bool) -> None:
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.use_fp8 = use_fp8

    def forward(self, x: Tensor) -> Tensor:
        if self.use_fp8 and self.training:
            out: Tensor = torch.ops.nanogpt.mm(x.flatten(0, -2), self.weight)[0]
            return out
        return functional.linear(x, self.weight.type_as(x))


class FP8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.somebody.multiply(x, self.weight)  # type: ignore[no-any-return]


class Fp8NoLinear(nn.Module):
    """Derives from no nn.Linear, as DeepSeek-V3's layer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"))


class Quanto(nn.Linear):
    """Says what it quantizes to, as quanto 0.2.7 before ``freeze`` (``optimum/quanto/nn/qmodule.py``)."""

    weight_qtype = type("qtype", (), {"name": "qfloat8_e4m3fn"})()


@pytest.mark.parametrize(
    ("module", "stack", "use"),
    [
        (CastedLinear(64, 32, True), "own", "unknown"),
        (FP8Linear(64, 32), "own", "unknown"),
        (Fp8NoLinear(64, 32), "own", "unknown"),
        (Quanto(64, 32), "own", "unknown"),
        (CastedLinear(64, 32, False), "torch", "none"),
    ],
    ids=["switched on", "class", "no nn.Linear", "quanto", "switched off"],
)
def test_layers_that_users_wrote(module: nn.Module, stack: str, use: str) -> None:
    (found,) = network(nn.Sequential(module)).linears
    assert (found.stack, found.use, found.recipe) == (stack, use, None)
    assert (found.in_features, found.out_features) == (64, 32)


def test_the_verdict_never_denies_fp8() -> None:
    model: Any = nn.Sequential(FP8Linear(64, 32), nn.Linear(32, 32))
    report = inspect_model(model, torch.zeros(48, 64), trial=False)
    assert (report.verdict.status, report.answer.has_fp8) == ("open", False)
    assert report.answer.state


class _FP8FlashAttentionWrapper(nn.Module):
    """As torchao's, which axolotl's ``attn_implementation: fp8`` puts around a model."""


def test_fp8_outside_of_layers() -> None:
    assert network(nn.Sequential(_FP8FlashAttentionWrapper(), nn.Linear(4, 4))).fp8_calls
    assert not network(nn.Sequential(nn.Linear(32, 32))).fp8_calls


class _Scaled(torch.autograd.Function):
    """Multiplies in FP8 forward, and in 16 bits backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, weight)
        one = torch.ones((), device=x.device)
        in_fp8 = [each.to(torch.float8_e4m3fn) for each in (x, weight)]
        return torch._scaled_mm(in_fp8[0], in_fp8[1].t(), one, one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ x


@torch.library.custom_op("somebody::mm", mutates_args=())
def operator(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """An operator that keeps its FP8 tensors for the backward, as modded-nanogpt's."""
    return x @ weight.t(), x.to(torch.float8_e4m3fn)


operator.register_fake(lambda x, weight: (x @ weight.t(), x.to(torch.float8_e4m3fn)))


class _Calling(nn.Module):
    """Holds a Linear, or a Parameter alone, and multiplies it in a function of its own or plainly."""

    def __init__(self, *, linear: bool, fp8: bool | str) -> None:
        super().__init__()
        self.held = nn.Linear(64, 64, bias=False) if linear else nn.Parameter(torch.zeros(64, 64))
        self.fp8 = fp8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self.held, "weight", self.held)
        if self.fp8 == "operator":
            return torch.ops.somebody.mm(x, weight)[0]  # type: ignore[no-any-return]
        return _Scaled.apply(x, weight) if self.fp8 else x @ weight.t()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("fp8", [True, False, "operator"])
def test_fp8_in_a_function_is_seen_in_a_forward(linear: bool, fp8: bool | str) -> None:
    """Such a model is never told to train in BF16, or to convert."""
    report = looked(_Calling(linear=linear, fp8=fp8).bfloat16(), torch.zeros(32, 64, dtype=torch.bfloat16))
    assert bool(report.facts.network.fp8_calls) is bool(fp8)
    if fp8:
        assert report.verdict.status == "open"
        assert report.prescription == ()
        assert not report.answer.takes_no_fp8
