"""What the child tells its parent, one JSON message a line."""

from __future__ import annotations

from typing import Any

import msgspec

from fp8doctor.stages import Doing


class Begun(msgspec.Struct, tag=True):
    """The child begins something."""

    doing: Doing
    until: float | None = None
    """The clock (``time.monotonic``, one for all processes) at which the parent ends the trial; None before
    the trial, where each stage has a limit of its own."""
    arm: str | None = None
    """The arm of the trial that is being built, which is left out if the child dies of it."""


class Examined(msgspec.Struct, tag=True):
    """Everything that is known so far."""

    facts: dict[str, Any]


class Traced(msgspec.Struct, tag=True):
    """The trace of an arm was kept in a file, or could not be."""

    file: str
    problem: str | None = None


class Mistake(msgspec.Struct, tag=True):
    """A `UserError`."""

    message: str
    detail: str


class Lost(msgspec.Struct, tag=True):
    """An arm left the GPU unusable for this process."""

    arm: str
    reason: str


class Failure(msgspec.Struct, tag=True):
    """fp8doctor itself failed, in a sentence."""

    sentence: str


class Done(msgspec.Struct, tag=True):
    """Nothing more will be sent."""


Message = Begun | Examined | Traced | Mistake | Lost | Failure | Done
