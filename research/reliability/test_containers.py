"""Repeated containers without a forward of their own: what is in them is compiled, and the model runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchao.float8 import convert_to_float8_training

from fp8doctor import Report, inspect_model

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class InLists(nn.Module):
    """vit_pytorch's Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), FeedForward()]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for attention, feed_forward in self.layers:
            x = feed_forward(attention(x) + x) + x
        return x


class InDicts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.ModuleDict({"attn": Attention(), "mlp": FeedForward()}) for name in ("a", "global")}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer["mlp"](layer["attn"](x) + x) + x
        return x


class Deeper(nn.Module):
    """Funnel's stages, and x_transformers' lists of norms beside what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleList([nn.ModuleList([nn.LayerNorm(64)]), part()])
                for part in (Attention, FeedForward)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for (norm,), part in stage:
                x = part(norm(x)) + x
        return x


MODELS = [InLists, InDicts, Deeper]


def converted(build: Callable[[], nn.Module]) -> nn.Module:
    from torchao.float8 import Float8LinearConfig

    return convert_to_float8_training(build().bfloat16(), config=Float8LinearConfig(emulate=True))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without kernels, whoever calls it."""
    whole, in_place = torch.compile, nn.Module.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: whole(model, backend="eager"))
    monkeypatch.setattr(nn.Module, "compile", lambda self: in_place(self, backend="eager"))


def graphs(model: nn.Module) -> int:
    """Graphs that a step of the model compiles."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    return counters["stats"]["unique_graphs"]


def eager_layers(report: Report) -> list[str]:
    return [linear.name for linear in report.facts.network.linears if linear.compiled is None]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("build", MODELS)
def test_applied_and_by_its_lines_it_runs_and_is_compiled(build: Callable[[], nn.Module]) -> None:
    model, another = converted(build), converted(build)
    before = inspect_model(model)
    assert len(eager_layers(before)) == len(before.facts.network.linears) > 0
    names = {"model": another, "torch": torch}
    exec(next(step.treatment.code for step in before.prescription if "CMP001" in step.mends), names)
    for changed in (before.prescription.apply(model), names["model"]):
        after = inspect_model(changed)
        assert graphs(changed) > 0
        assert eager_layers(after) == []
        assert "CMP001" not in [finding.code for finding in after.findings]
        assert all(each.compiled == each.count for each in after.facts.network.blocks)
