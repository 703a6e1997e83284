"""Messages between parent and child: the request for a trial, and the child's answers as lines of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fp8doctor.facts.arm_names import ArmName
from fp8doctor.stages import Doing


@dataclass(frozen=True)
class TrialRequest:
    """Time, device, checks and traces of a trial; the command line makes it before there is a worker."""

    budget_s: float | None = None
    """None: the trial chooses by the size of the model and what there is to compile."""
    device: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks."""
    trace: str | None = None
    """Absolute path for the trace of the step as it is, because a model file may change the folder."""

    def trace_of(self, arm: str) -> Path | None:
        """Name a variant's trace file, with its name before the suffix; None if traces are not kept."""
        if self.trace is None:
            return None
        file = Path(self.trace)
        if arm == ArmName.AS_IS:
            return file
        ending = "".join(file.suffixes[-2:]) if file.suffix == ".gz" else file.suffix
        return file.with_name(f"{file.name.removesuffix(ending)}.{arm}{ending}")


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


class Traced(msgspec.Struct, tag=True):
    """A variant's trace was kept in a file, or could not be."""

    file: str
    problem: str | None = None


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


Message = Begun | Examined | Traced | Mistake | Lost | Failure | Done
