"""What a trial is asked to be. A file of its own, because the command line fills it in before the worker is started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrialOrder:
    """The time of a trial, its device, and the checks whose treatments it tries."""

    budget_s: float
    device: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks."""
