"""Loss and gradients that are not finite are seen, and stay out of the weights."""

import math

import pytest
import torch
from torch import nn

from fp8doctor.trial.copies.step import WatchedSteps


def watched(
    factor: float, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, sparse: bool = False
) -> tuple[WatchedSteps, nn.Embedding]:
    """A step whose loss is a sum of weights times ``factor``."""
    torch.manual_seed(0)
    model = nn.Embedding(8, 4, sparse=sparse)
    optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]

    def step() -> torch.Tensor:
        loss = (model(torch.tensor([1, 2])) * factor).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return WatchedSteps(step, optimizer), model


@pytest.mark.parametrize(
    ("factor", "sparse", "not_finite"),
    [
        (2.0, False, ()),
        (2.0, True, ()),
        (1e19, False, ()),  # the largest gradient is looked at, not a norm that overflows by itself
        (2e38, False, ("loss", "gradients")),  # its square is infinite, as in Adam's state
        (math.nan, False, ("loss", "gradients")),
        (math.inf, True, ("loss", "gradients")),
    ],
)
def test_what_is_not_finite_is_seen_and_stays_out_of_the_weights(
    factor: float, sparse: bool, not_finite: tuple[str, ...]
) -> None:
    steps, model = watched(factor, torch.optim.SGD if sparse else torch.optim.AdamW, sparse)
    before = model.weight.detach().clone()
    steps()
    assert steps.non_finite() == not_finite
    assert "gradients" in not_finite or not torch.equal(model.weight, before)
    steps.unwatched()()
    assert model.weight.isfinite().all()
    assert not steps._optimizer._optimizer_step_pre_hooks


class WithoutConstructor(torch.optim.SGD):
    """An optimizer of somebody's that never calls torch's constructor."""

    def __init__(self, parameters: object, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]  # type: ignore[call-overload]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def test_nobody_sees_behind_an_optimizer_without_hooks() -> None:
    steps, _ = watched(math.nan, WithoutConstructor)
    steps()
    assert steps.non_finite() is None
