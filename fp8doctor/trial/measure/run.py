"""What one trial is given beside the job and its arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from fp8doctor.facts import Facts, Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stages import Stage
from fp8doctor.trial.measure.budget import Budget

KeepTrace = Callable[[str, Path], object]
"""Takes the name of an arm and the trace of its step at the deepest cut, a file that is removed
afterwards."""


class Ahead(Protocol):
    """Compiles arms beside the trial, before it comes to them."""

    def know(self, facts: Facts) -> None:
        """Take the facts that the arms are planned with."""

    def begin(self, arms: Sequence[str]) -> None:
        """Have the arms compiled, the first of them first."""

    def done(self) -> frozenset[str]:
        """Name the arms that are compiled."""

    def end(self) -> bool:
        """End all that is done beside the trial, and tell whether there was any."""


class Nobody:
    """Compiles nothing."""

    def know(self, facts: Facts) -> None:
        pass

    def begin(self, arms: Sequence[str]) -> None:
        pass

    def done(self) -> frozenset[str]:
        return frozenset()

    def end(self) -> bool:
        return False


def _ignore(*_: object) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class TrialRun:
    """Where a trial runs, how long, what it leaves out and who is told what."""

    device: torch.device
    budget: Budget
    progress: Callable[[str, str | None], object] = _ignore
    """Receives what is being done, and with which arm."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """Arm or part that is left out -> the reason, for a trial that begins again after that part took the
    process down."""
    keep: Callable[[Trial], object] = _ignore
    """Receives the partial trial before each optional part starts."""
    keep_trace: KeepTrace | None = None
    """Receives the trace of every arm that is profiled."""
    begin: Callable[[Stage], object] = _ignore
    """Receives the stage of the trial that begins."""
    own_process: bool = False
    """Whether the process is there for the trial, and no user's."""
    ahead: Ahead = field(default_factory=Nobody)
    """Who compiles beside the trial until it times the arms."""

    def skipped(self, arm: str) -> NoNumber | None:
        """Tell why the arm is left out; None when it is not."""
        return NoNumber(Reason.TOOK_PROCESS_DOWN, self.skip[arm]) if arm in self.skip else None
