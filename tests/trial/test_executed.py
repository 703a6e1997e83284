"""What a first step runs, and what it runs again: seen on real steps, and told by the trial."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.measure.trial_run import TrialRun
from tests.examine.test_checkpoint_calls import ON, Layer


class Shared(nn.Module):
    """One layer that runs twice, as in ALBERT: nothing is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


class InLists(nn.Module):
    """Blocks without a forward of their own, as in vit_pytorch."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Layer(), Layer()]) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in self.layers:  # type: ignore[misc]
            x = second(checkpoint(first, x, use_reentrant=False))
        return x


def bench(model: nn.Module) -> Bench:
    job = Job(model, Target(), Workload(accumulate=1), torch.randn(2, 16), lambda output, batch: output.sum())
    return Bench(job, ["layers"], TrialRun(torch.device("cpu"), Budget(600)))


@pytest.mark.parametrize(
    ("build", "again"),
    [
        (Shared, ()),
        (ON["partial"], ("layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up")),
        (ON["composable"], ("layers.0", "layers.1")),
        (InLists, ("layers.0.0", "layers.1.0", "layers.2.0")),
    ],
)
def test_what_is_recomputed_is_seen(build: Callable[[], nn.Module], again: tuple[str, ...]) -> None:
    assert bench(build()).recomputed == again


@pytest.mark.slow
def test_blocks_that_are_lists_are_cut() -> None:
    assert [len(base.layers) for base in bench(InLists(26)).bases] == [4, 12]
