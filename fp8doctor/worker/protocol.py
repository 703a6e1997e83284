"""Messages between parent and child: the request for a trial, and the child's answers as lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from fp8doctor.stages import Doing


@dataclass(frozen=True)
class TrialRequest:
    """Time, device and checks of a trial; the command line makes it before there is a worker."""

    budget_s: float | None = None
    """None: the trial chooses by the size of the model and what there is to compile."""
    device: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks."""


class Begun(msgspec.Struct, tag=True):
    """The child begins something."""

    doing: Doing
    until: float | None = None
    """Clock (``time.monotonic``, the same for all processes) at which the parent ends the trial; None before
    the trial, where each stage has its own limit."""
    arm: str | None = None
    """Variant that is being built. It is left out if the child dies in it."""


class Examined(msgspec.Struct, tag=True):
    """Everything that is known so far."""

    facts: dict[str, Any]


class Mistake(msgspec.Struct, tag=True):
    """A `UserError`."""

    message: str
    detail: str


class Lost(msgspec.Struct, tag=True):
    """A variant left the GPU unusable for this process."""

    arm: str
    reason: str


class Failure(msgspec.Struct, tag=True):
    """fp8doctor itself failed, in a sentence."""

    sentence: str


class Done(msgspec.Struct, tag=True):
    """Nothing more will be sent."""


Message = Begun | Examined | Mistake | Lost | Failure | Done
