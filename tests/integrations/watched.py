"""How the tests of callbacks watch a training, and what of ours could be left in it."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fp8doctor.facts import recorded
from fp8doctor.running import step_window
from fp8doctor.stacks.torch_private import COMPILED_CALL

STEPS, WARMUP = 3, 2
PROFILED = WARMUP + STEPS + 2
"""Steps until the one after the window is profiled, which the one before it prepares."""


def left_behind(model: nn.Module) -> list[str]:
    """Name everything of ours that could be in the way of a training."""
    left = [name for name, each in model.named_modules() if COMPILED_CALL in vars(each)]
    left += ["the data loader"] * hasattr(_BaseDataLoaderIter.__next__, "__wrapped__")
    left += ["steps"] * len(torch_optimizer._global_optimizer_post_hooks)
    left += ["registrations"] * len(torch_module._global_module_registration_hooks)
    return left


def clock_of_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that each entry of the list moves by a second, and all else by next to nothing."""
    read: list[int] = []
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: len(read) + 1e-6 * next(ticks))
    monkeypatch.setattr(step_window, "time", clock)
    return read


def hold_only_steps(callback: Any) -> None:
    """Nothing that ran between two steps is part of one, or of the profile."""
    observed = callback.report.facts.observed
    assert max(observed.data_ms) <= max(observed.steps_ms) < 1
    assert len(observed.steps_ms) == STEPS
    assert not recorded(observed, "breakdown")
