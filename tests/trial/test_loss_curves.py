"""Paired steps on copies: their loss in FP8, in BF16 and in BF16 with other last bits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8doctor.facts import LossCurve, Workload
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.trial.conductor import conduct
from fp8doctor.trial.layers import loss_curves
from fp8doctor.trial.layers.loss_curves import LOSSES, disturb, why_not
from fp8doctor.trial.layers.optional_parts import NotMeasured
from fp8doctor.trial.measure import layout, timer
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from fp8doctor.trial.planning import as_it_is, eager_bf16
from fp8doctor.trial.variant import VariantPlan
from tests.trial.test_numerics import CPU, NEVER, Block, batch, fp8, job, loss, stack

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And few steps."""
    monkeypatch.setattr(loss_curves, "STEPS", 6)
    monkeypatch.setattr(timer, "MOST_ROUNDS", timer.LEAST_ROUNDS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def followed(model: nn.Module, until: float = NEVER, **settings: Any) -> tuple[LossCurve, ...]:
    return loss_curves.loss_curves(Bench(job(model, **settings), [], CPU), until)


def of(curves: tuple[LossCurve, ...], arm: str) -> list[tuple[float | None, ...]]:
    return [curve.losses for curve in curves if curve.arm == arm]


def test_every_run_begins_at_the_same_weights_and_learns_at_the_users_rate() -> None:
    model = fp8(stack(Block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    curves = followed(model, optimizer=optimizer)
    assert [curve.arm for curve in curves] == ["as_is", "bf16", "bf16_disturbed", "bf16_disturbed"]
    assert {len(curve.losses) for curve in curves} == {loss_curves.STEPS}
    assert {curve.learning_rates for curve in curves} == {(0.5,)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # BF16 is what a loop of one's own gives.
    twin, x = stack(Block), batch()
    own = torch.optim.SGD(twin.parameters(), lr=0.5)
    expected = []
    for _ in range(loss_curves.STEPS):
        value = loss(twin(x), x)
        value.backward()
        own.step()
        own.zero_grad()
        expected.append(value.item())
    (bf16,) = of(curves, "bf16")
    assert list(bf16) == expected
    assert bf16[-1] < bf16[0]
    (in_fp8,), disturbed = of(curves, "as_is"), of(curves, "bf16_disturbed")
    assert in_fp8 != bf16
    assert bf16 not in disturbed
    assert disturbed[0] != disturbed[1]


class NumpyDropout(nn.Module):
    """Drops by NumPy's random numbers, as the masks of speech models in transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(2.0 * (np.random.rand(*x.shape) < 0.5)).to(x)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), NumpyDropout()], ids=["torch", "NumPy"])
def test_dropout_draws_the_same_in_every_run(dropout: nn.Module) -> None:
    """The third run differs from BF16 by the last bit alone, which moves a loss by less than dropout does."""
    model = stack(Block)
    model.append(dropout)
    curves = followed(fp8(model), optimizer=None)
    (bf16,), disturbed = of(curves, "bf16"), of(curves, "bf16_disturbed")
    spread = max(bf16) - min(bf16)  # type: ignore[type-var, operator]
    assert all(
        abs(a - b) < spread / 4  # type: ignore[operator]
        for each in disturbed
        for a, b in zip(each, bf16, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_is_moved_by_one_last_bit_of_bf16(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to(dtype)
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = 0.0, 1.0
        model[0].weight.copy_(model[0].weight.bfloat16())
    before = model[0].weight.detach().clone().float()
    disturb(model, ["0"], 3)
    moved = model[0].weight.detach().float()
    whole = before != 0
    steps = (moved - before)[whole].abs() / torch.exp2(before[whole].abs().log2().floor() - 7)
    assert torch.equal(steps, torch.ones_like(steps))
    assert moved[0, 0] == 0
    assert 0.4 < ((moved > before)[whole]).float().mean() < 0.6


@pytest.mark.parametrize(
    ("workload", "rate", "reason"),
    [
        ({"loss_source": "mean"}, 0.1, "the loss is synthetic"),
        ({"batch_source": "made up"}, 0.1, "the batch is synthetic"),
        ({}, 0.0, "learning rate is 0"),
    ],
)
def test_what_is_made_up_is_not_followed(workload: dict[str, str], rate: float, reason: str) -> None:
    model = fp8(stack(Block))
    settings = Workload(**{"accumulate": 1, "batch_source": "given", "loss_source": "given", **workload})
    bench = Bench(
        job(model, workload=settings, optimizer=torch.optim.SGD(model.parameters(), lr=rate)), [], CPU
    )
    assert reason in (why_not(bench, ["0.up", "0.down"]) or "")


def test_a_warm_up_that_begins_at_0_leads_to_its_rate() -> None:
    model = fp8(stack(Block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    assert optimizer.param_groups[0]["lr"] == 0
    assert Bench(job(model, optimizer=optimizer), [], CPU).rates == [[0.25]]


def test_initialised_weights_are_not_followed() -> None:
    model = fp8(nn.Sequential(Block()).bfloat16())
    with pytest.raises(NotMeasured, match="initializer"):
        followed(model)


def test_without_time_nothing_is_followed_and_few_steps_are_told_as_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NotMeasured, match="used up"):
        followed(fp8(stack(Block)), until=time.monotonic() - 1)
    monkeypatch.setattr(loss_curves, "STEPS", loss_curves.FEWEST_STEPS - 1)
    with pytest.raises(NotMeasured, match="not have been enough"):
        followed(fp8(stack(Block)))


def test_a_loss_that_leaves_the_numbers_is_none() -> None:
    model = fp8(stack(Block))
    curves = followed(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e30))
    assert of(curves, "bf16")[0][0] is not None
    assert None in of(curves, "bf16")[0]


class Deep(nn.Module):
    """So deep that it is cut, unless the memory is roomy for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = stack(*[Block] * 26)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(x)
        return output


@pytest.mark.parametrize(("gpu_gib", "cuts"), [(None, [4, 12]), (1.0, [])])
def test_a_deep_model_is_followed_at_its_smaller_cut(
    gpu_gib: float | None, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps of the whole would take as long as all that the budget has for them."""
    monkeypatch.setattr(layout, "whole_gib", lambda device: gpu_gib)
    model = fp8(Deep())
    bench = Bench(job(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)), ["blocks"], CPU)
    assert [cut.kept["blocks"] for cut in bench.plan.cuts if cut.kept] == cuts
    curves = loss_curves.loss_curves(bench, NEVER)
    assert [(curve.blocks, curve.learning_rates) for curve in curves] == 4 * [({"blocks": 4}, (0.5,))]
    assert {len(curve.losses) for curve in curves} == {loss_curves.STEPS}


def test_a_trial_follows_it_last_and_leaves_the_model_alone() -> None:
    model = fp8(stack(Block))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plans = [VariantPlan(ArmName.AS_IS, as_it_is), VariantPlan(ArmName.BF16, eager_bf16, fp8=False)]
    parts: list[str | None] = []
    run = TrialRun(CPU, Budget(600), lambda text, part: parts.append(part))
    trial = conduct(job(model), [], plans, run)
    assert trial.harm == ()
    assert [curve.arm for curve in trial.losses] == ["as_is", "bf16", "bf16_disturbed", "bf16_disturbed"]
    assert all(each is not None for curve in trial.losses for each in curve.losses)
    assert parts[-2:] == [LOSSES, None]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
