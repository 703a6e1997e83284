"""No step with an autocast is said to have none, wherever it opens it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fp8doctor.analysis.fp8_request import lacks_autocast
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.render.text import render
from fp8doctor.running.observer import ScriptObserver
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard

WIDTH = 32
ON = torch.autocast("cpu", dtype=torch.bfloat16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(x).relu())
        return output.float()


class Held(Net):
    """Its code does not name what it opens."""

    context = ON

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            return super().forward(x)


class Loss(nn.Module):
    """Computes the loss, and the model in it, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mse_loss(self.model(x), x)


class OfSmallPart(Net):
    """Opens one around no layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return super().forward(x)


def plain(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(16, WIDTH)).mean()
    return loss


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(model: nn.Module) -> torch.Tensor:
    return plain(model)


def around_the_loss(model: nn.Module) -> torch.Tensor:
    output = model(torch.ones(16, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse_loss(output, torch.ones(16, WIDTH))


@pytest.mark.parametrize(
    ("kind", "step", "dtype", "lacks"),
    [
        (Held, plain, "bfloat16", False),
        (Loss, plain, "bfloat16", False),
        (Net, decorated, "bfloat16", False),
        (Net, around_the_loss, None, False),
        (OfSmallPart, plain, None, False),
        (Net, plain, None, True),
    ],
)
def test_an_autocast_of_a_watched_step(
    kind: type[nn.Module],
    step: Callable[[nn.Module], torch.Tensor],
    dtype: str | None,
    lacks: bool,
    observer: ScriptObserver,
    heard: Heard,
) -> None:
    model, own = kind(), torch.autocast.__enter__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.autocast("cpu", enabled=False):  # opens none, and neither does an evaluation
        pass
    for _ in range(WARMUP + STEPS + PROFILED):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.ones(16, WIDTH))
        step(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.autocast.__enter__ is own
    assert heard.facts.training.autocast == dtype
    assert lacks_autocast(heard.facts) is lacks
    if not lacks:
        assert "no autocast" not in render(diagnose(heard.facts), verbose=True)
