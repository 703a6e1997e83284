"""What a watched script's process tells the reporting one, as JSON lines, and what it is asked to watch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from fp8doctor.facts import Facts, Ranks


class News(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What is known of a script, or new; a field that is not set is no news."""

    torch: bool = False
    """The script imported torch."""
    stepped: bool = False
    """An optimizer of torch took its first step."""
    complete: bool = False
    """The window was watched to its end."""
    ended: bool = False
    """Python is about to end the process normally."""
    error: str | None = None
    """The exception that ends the process, in a line."""
    steps: int | None = None
    """At the end: steps of the optimizer with the most parameters."""


class Message(News):
    """News, and what is not kept as it came."""

    note: str | None = None
    """A sentence for the end of the report."""
    progress: str | None = None
    """A line to show while the script runs."""
    facts: dict[str, Any] | None = None
    """All facts so far."""
    watched: int | None = None
    """The watching is over after this many steps, and the script goes on."""


class ScriptState(News):
    """The messages of a script so far."""

    facts: Facts | None = None
    running: bool = False
    """Messages may still come."""
    notes: list[str] = []
    ranks: Ranks | None = None
    """All processes of the job; None if it has one."""

    def take(self, message: Message) -> None:
        """Add a message, but for its facts and progress."""
        for name in News.__struct_fields__:
            value = getattr(message, name)
            if value is not None and value is not False:
                setattr(self, name, value)
        if message.note is not None:
            self.notes.append(message.note)


class WatchOptions(NamedTuple):
    """How long to watch the script, and what to do afterwards."""

    script: str
    """The file's or module's name, for the report."""
    steps: int
    """Steps of the window."""
    warmup: int
    """Least number of steps before the window."""
    stop: bool
    """Stop the script after the window."""
    budget_s: float | None
    """Seconds for a trial on copies after the window. None: no trial."""
    device: str | None
    """Device of the trial."""
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Absolute paths of folders with third-party checks."""
    module: bool = False
    """Started with ``-m``."""
    health: str | None = None
    """Absolute path of the file for FP8's health, or None."""
    every: int | None = None
    """Steps between its samples; None if the sampler chooses."""
    stop_on_nan: bool = False
    """Stop the script at the first loss or gradient that is not finite."""
    rank: int | None = None
    """Of this process in a job of several; None if it is alone."""
