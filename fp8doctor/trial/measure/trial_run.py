"""What one trial is given beside the job, and its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fp8doctor.errors import UserError
from fp8doctor.facts import Trial
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stages import Stage
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.state.guard import Guard
from fp8doctor.wording import sentence

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


def choose_device(name: str | None) -> torch.device | None:
    """Choose the device to time on: the named one, else the current CUDA device, else None.

    Raises `UserError` for a name that is no device here.
    """
    if name is not None:
        return _named(name)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device; write cuda, cuda:1 or cpu") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise UserError(f"{name!r} cannot be timed on; write cuda, cuda:1 or cpu")
    if not torch.cuda.is_available():
        raise UserError(f"{name!r} was asked for, and torch sees no CUDA device here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise UserError(
            f"{name!r} was asked for, and torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return torch.device("cuda", index)


class DeviceLost(Exception):
    """An arm left the GPU unusable for this process (a sticky CUDA error). ``arm`` names it, or the part of
    the trial that did."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm = arm
        self.trial: Trial | None = None
        """What was known before, where every arm had been timed and proven."""

    @property
    def no_number(self) -> NoNumber:
        """Tell why the arm has no number."""
        return NoNumber(Reason.TOOK_PROCESS_DOWN, str(self))


def still_there(device: torch.device, part: str) -> None:
    """Raise `DeviceLost` when the failure of ``part`` of the trial left the GPU's context unusable."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(part, f"it took the GPU's context down: {sentence(error)}") from error


def gpu_name(device: torch.device) -> str | None:
    """Return CUDA's name of the GPU; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
