"""What one trial is given beside the job and its arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp8doctor.facts import Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stages import Stage
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.state.guard import Guard

KeepTrace = Callable[[str, Path], object]
"""Takes the name of an arm and the trace of its step at the deepest cut, a file that is removed
afterwards."""


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
    guard: Guard | None = None
    """Who stands before what is the user's in every step."""

    def skipped(self, arm: str) -> NoNumber | None:
        """Tell why the arm is left out; None when it is not."""
        return NoNumber(Reason.TOOK_PROCESS_DOWN, self.skip[arm]) if arm in self.skip else None
