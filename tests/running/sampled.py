"""Small FP8 models that train on the CPU while their health is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from fp8doctor.health.record import Health, read_health
from fp8doctor.health.verdict import HealthVerdict, conclude
from fp8doctor.running.long_watch import LongWatch
from fp8doctor.running.losses import Losses
from fp8doctor.running.script_messages import Message, WatchOptions
from tests.running.loops import Net


def float8(recipe: str = "tensorwise", blocks: int = 3, model: nn.Module | None = None) -> nn.Module:
    """Return a model in FP8, whose matmuls are computed in 32 bits as the CPU may have no others."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    torch.manual_seed(0)
    converted: nn.Module = convert_to_float8_training(model or Net(blocks), config=config)
    return converted


def watch(path: Path, every: int, tell: Callable[[Message], None]) -> LongWatch:
    """Begin to sample into a file."""
    settings = WatchOptions("train.py", 3, 1, False, None, None, health=str(path), every=every)
    losses = Losses()
    losses.begin()
    begun = LongWatch(settings, tell, losses)
    begun.install()
    return begun


class Training:
    """Trains a model step by step, to predict what a fixed network does with random rows."""

    def __init__(self, model: nn.Module, path: Path | None, every: int = 5, lr: float = 1e-3) -> None:
        torch.manual_seed(1)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.wanted = nn.Linear(16, 16).requires_grad_(False)
        self.notes: list[str] = []
        self.path = path
        self.watch = None
        if path is not None:
            self.watch = watch(path, every, lambda said: self.notes.append(said.note or ""))
            self.watch.know(SimpleNamespace(model=model, compiled=False), self.optimizer)  # type: ignore[arg-type]
        self.steps = 0

    def run(self, steps: int, before: Callable[[int], Any] = lambda step: None) -> torch.Tensor:
        """Train, calling ``before`` with each step's number."""
        loss = torch.zeros(())
        for _ in range(steps):
            self.steps += 1
            before(self.steps)
            x = torch.randn(32, 16)
            loss = (self.model(x) - self.wanted(x)).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.watch is not None:
                self.watch.stepped(self.optimizer, sample=True)
        return loss.detach()

    def judged(self) -> tuple[Health, HealthVerdict]:
        """Read the file back, and judge it."""
        assert self.path is not None
        assert self.watch is not None
        self.watch.ended()
        assert self.notes == []
        health = read_health(self.path)
        assert [sample.notes for _, sample in health.samples if sample.notes] == []
        return health, conclude(health)
