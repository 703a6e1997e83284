"""What the command line asks of the watching; it travels to the script's process as JSON."""

from __future__ import annotations

from typing import NamedTuple

STEPS, WARMUP = 10, 5
"""Steps of the window and before it. Ten give a median whose range holds the true one with 98 %
(`fp8doctor.analysis.significance`); compilation and the allocator settle within five, seen on the H200."""


class Settings(NamedTuple):
    """How long the script is watched, and what happens afterwards."""

    script: str
    """What the report calls it: the file's name, or the module's."""
    steps: int
    """Steps of the window."""
    warmup: int
    """Steps before it, at least."""
    stop: bool
    """Whether the script is stopped when the window has been examined."""
    budget_s: float | None
    """Seconds of the trial that follows, at once where the script is stopped, else when it is over; None: no
    trial."""
    device: str | None
    """Where to time it."""
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Folders of third-party checks, absolute."""
    module: bool = False
    """Whether it is started by its module's name, with ``-m``."""
