"""What a watched script's process tells the one that reports, one JSON message a line."""

from __future__ import annotations

import os
import select
from typing import Any, Protocol

import msgspec


class Imported(msgspec.Struct, tag=True):
    """The script imported torch."""


class Note(msgspec.Struct, tag=True):
    """A sentence about what was not seen, for the end of the report."""

    text: str


class Progress(msgspec.Struct, tag=True):
    """What is being done, to be shown while the script runs."""

    text: str


class Stepped(msgspec.Struct, tag=True):
    """An optimizer of torch took its first step."""

    forked: bool
    """Whether in a process that the script forked, where nothing is watched."""


class Observed(msgspec.Struct, tag=True):
    """Everything that is known so far."""

    facts: dict[str, Any]
    complete: bool
    """Whether the window was watched to its end."""


class Ended(msgspec.Struct, tag=True):
    """Python is about to end the script's process in the ordinary way."""

    steps: int
    """Steps that were seen of the optimizer that holds most."""
    all_steps: int | None = None
    """Steps of all optimizers of torch in this process, to its end; None where nobody counted."""
    error: str | None = None
    """The exception that ends it, in a line; None where none does."""


Message = Imported | Note | Progress | Stepped | Observed | Ended


class Listener(Protocol):
    """Who is told what an observer sees."""

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a process that the script forked."""

    def send(self, message: Message) -> None:
        """Take a message."""


READER_TAKES_S = 10.0
"""The longest that a script waits for the reader of its messages. A choice: the reader does nothing else."""


class Channel:
    """The way from the script's process to the one that reports. Whatever becomes of it, the script goes
    on."""

    def __init__(self, number: int) -> None:
        self.owner = os.getpid()
        self._fd = number
        self._pipe = os.fstat(number).st_ino
        os.set_inheritable(number, False)
        self._whole = True

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a process that the script forked."""
        return os.getpid() != self.owner

    def send(self, message: Message) -> None:
        """Send one message. A reader who is gone, or a file in the place of the pipe, takes nothing."""
        line = msgspec.json.encode(message) + b"\n"
        if not self._whole:  # an exception of the user's interrupted the last line
            line = b"\n" + line
        try:
            if os.fstat(self._fd).st_ino != self._pipe:
                return
            self._whole = False
            while line:
                if not select.select([], [self._fd], [], READER_TAKES_S)[1]:
                    return
                line = line[os.write(self._fd, line[: select.PIPE_BUF]) :]
            self._whole = True
        except OSError:
            self._whole = True
