"""Describe one run of a trial: its device, budget and callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8doctor.errors import UserError
from fp8doctor.facts import Trial
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.stages import Teller
from fp8doctor.trial.measure.budget import Budget
from fp8doctor.trial.state.guard import Guard
from fp8doctor.wording import sentence


@dataclass
class TrialRun:
    device: torch.device
    budget: Budget
    teller: Teller = field(default_factory=lambda: Teller(lambda *_: None, math.inf))
    """Receives each stage and activity, and the variant that it is about."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """Variant or part that is left out -> the reason, after it crashed an earlier process."""
    keep: Callable[[Trial], object] = lambda *_: None
    """Receives the partial trial before each optional part starts."""
    own_process: bool = False
    """Whether the process runs only this trial, and is not the user's."""
    guard: Guard | None = None
    """Watches for writes to the user's objects in every step."""
    apart_gib: float = 0.0
    """What the job holds on the device apart from its model, if the process is not the user's."""

    def trial(self, **fields: Any) -> Trial:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        fields = {"gaps": {}, **fields}
        return Trial(device=self.device.type, gpu=gpu, budget_s=self.budget.seconds, **fields)

    def without_times(self, no_number: NoNumber) -> Trial:
        why = {"why": no_number.why, "reason": no_number.sentence, "reliable": False}
        return self.trial(blocks={}, arms=(), self_check_ratio=None, **why)


def choose_device(name: str | None) -> torch.device | None:
    """Return the named device, else the current CUDA device, else None.

    Raises `UserError` for a name that is no device here.
    """
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device; write cuda, cuda:1 or cpu") from None
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.cuda.current_device() if count and device.index is None else device.index or 0
    if device.type != "cuda" or index >= count:
        here = f"torch sees {count or 'no'} CUDA devices here"
        raise UserError(f"{name!r} cannot be timed on, {here}; write cuda, cuda:1 or cpu")
    return torch.device("cuda", index)


class DeviceLost(BaseException):
    """A variant or part of the trial, ``arm``, left the GPU unusable (sticky error).

    No `Exception`: nothing that goes on without the variant may catch it.
    """

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm = arm


def still_there(device: torch.device, part: str) -> None:
    """Raise `DeviceLost` if ``part`` of the trial left the GPU's context unusable."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(part, f"it took the GPU's context down: {sentence(error)}") from error
