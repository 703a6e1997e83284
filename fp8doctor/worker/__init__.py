"""The child process that runs torch and user code, and its parent, which imports neither.

Here are their messages: the request for a trial, and the child's answers as lines of JSON.
"""

from dataclasses import dataclass

import msgspec

from fp8doctor.facts import Facts
from fp8doctor.stages import Doing


@dataclass(frozen=True)
class TrialRequest:
    """Time, device and checks of a trial; the command line makes it before there is a worker."""

    budget_s: float | None = None
    """None: `fp8doctor.stages.BUDGET_S`."""
    device: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks."""


class Message(msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What the child tells; a field that is not set is no news."""

    doing: Doing | None = None
    """It begins this."""
    until: float | None = None
    """Clock (``time.monotonic``, the same for all processes) at which the parent ends the trial; None before
    the trial, where each stage has its own limit."""
    arm: str | None = None
    """Variant that is being built. It is left out if the child dies in it, or if it failed."""
    facts: Facts | None = None
    """Everything that is known so far."""
    mistake: tuple[str, str] | None = None
    """A `UserError` and its detail."""
    failed: str | None = None
    """Why nothing more is known, in a sentence: fp8doctor failed, or the variant left the GPU unusable."""
    done: bool = False
    """Nothing more will be sent."""
