"""Faults are named within 100 steps, and healthy trainings are accused of nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.running.layer_sampler import NO_SCALES, LayerSampler
from tests.running.loops import Net
from tests.running.sampled import Training, float8
from tests.stand_ins import transformer_engine as te

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_healthy_training_is_accused_of_nothing(recipe: str, tmp_path: Path) -> None:
    training = Training(float8(recipe), tmp_path / "health", every=10)
    training.run(100)
    health, verdict = training.judged()
    assert (verdict.status, verdict.conclusions) == ("healthy", ())
    assert health.steps == (2, *range(12, 93, 10))


class Outlier(torch.autograd.Function):
    """An identity whose gradient gets one huge element, as of a token with an extreme weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.clone()
        gradient.view(-1)[0] = ctx.factor * gradient.abs().amax()
        return gradient, None


def test_a_layer_whose_gradient_underflows(tmp_path: Path) -> None:
    training = Training(float8(), tmp_path / "health")
    layer = training.model.blocks[0].up  # type: ignore[union-attr,index]

    def plant(step: int) -> None:
        if step == 40:
            layer.register_forward_hook(
                lambda *each: Outlier.apply(each[2], 10 ** (7.5 + training.steps / 50))
            )

    training.run(100, plant)
    verdict = training.judged()[1]
    assert verdict.status == "faults"
    (fault,) = [fault for each in verdict.conclusions for fault in each.faults]
    assert (fault.kind, fault.layer, fault.operand) == ("flushed", "blocks.0.up", "gradient")
    assert 40 <= fault.since <= 60
    (said,) = verdict.conclusions
    assert 'keep = {"blocks.0.up"}' in said.code


def test_a_rate_that_diverges_is_not_blamed_on_fp8(tmp_path: Path) -> None:
    training = Training(float8(), tmp_path / "health", lr=1e-3)

    def plant(step: int) -> None:
        if step >= 50:
            training.optimizer.param_groups[0]["lr"] = 0.3

    training.run(100, plant)
    verdict = training.judged()[1]
    assert verdict.status == "diverges"
    assert verdict.rise is not None
    assert 50 <= verdict.rise.since <= 65


class Delayed(te.Linear):
    """Stands in for ``te.Linear`` under delayed scaling: real scales and histories, no FP8 kernel."""

    def __init__(self, width: int, length: int = 64) -> None:
        super().__init__(width, width, bias=False)
        nn.init.normal_(self.weight, std=0.1)
        for name, places in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            state = SimpleNamespace(scale=torch.ones(places), amax_history=torch.zeros(length, places))
            self.fp8_meta[name] = state
        self.fp8_meta["num_gemms"] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.prepare_forward()
        self._note("scaling_fwd", 0, x)
        self._note("scaling_fwd", 1, self.weight)
        out = nn.functional.linear(x, self.weight)
        out.register_hook(lambda gradient: self._note("scaling_bwd", 0, gradient))
        return out

    def _note(self, name: str, place: int, tensor: torch.Tensor) -> None:
        self.fp8_meta[name].amax_history[0, place] = tensor.detach().abs().max()

    def update(self) -> None:
        """Compute scales and roll histories, as the library does at the end of a step."""
        for name, most in (("scaling_fwd", 448.0), ("scaling_bwd", 57344.0)):
            state = self.fp8_meta[name]
            amax = state.amax_history.amax(0)
            state.scale.copy_(torch.where(amax > 0, most / amax, state.scale))
            state.amax_history.copy_(state.amax_history.roll(-1, 0))
            state.amax_history[0] = 0


def test_a_history_that_a_spike_has_poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    te.install(monkeypatch)
    torch.manual_seed(0)
    layer = Delayed(16)
    training = Training(nn.Sequential(Net(1), layer), tmp_path / "health")

    def spike(step: int) -> None:
        if step > 1:
            layer.update()
        if step == 40:  # one batch with a huge element
            layer.fp8_meta["scaling_fwd"].amax_history[0, 0] = 3e7
            handle = layer.register_forward_pre_hook(lambda module, args: (with_outlier(args[0]),))
            layer.register_forward_hook(lambda *each: handle.remove())

    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        training.run(100, spike)
    verdict = training.judged()[1]
    found = [fault for each in verdict.conclusions for fault in each.faults]
    assert {(fault.kind, fault.layer) for fault in found} == {("poisoned_history", "1")}
    assert {fault.operand for fault in found} >= {"input"}
    assert all(40 < fault.since <= 50 for fault in found)
    assert "Float8CurrentScaling()" in verdict.conclusions[0].code


def with_outlier(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    x[0, 0] = 3e7
    return x


def test_experts_of_transformer_engine_are_said_to_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scales stand in another order."""
    te.install(monkeypatch)
    layer = te.GroupedLinear(2, 16, 16)
    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        layer(torch.randn(4, 16), [2, 2])
    (found,) = LayerSampler(nn.Sequential(layer)).layers
    assert (found.stack, found.unseen) == ("transformer_engine", NO_SCALES)
