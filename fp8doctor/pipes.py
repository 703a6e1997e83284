"""Messages to another process: JSON lines through a pipe, whose number user code may close or take."""

import fcntl
import os
import resource
import select
import time
from collections.abc import Callable, Iterator

import msgspec

LOWEST_NUMBER = 200
"""Our file descriptors start here, above the user's. With a lower limit they are among the last."""

LAST = 8
"""How many numbers count as the last: four of ours, and four that may have been inherited. A choice."""


def pipe() -> tuple[int, int]:
    """Make a pipe with numbers that user code is unlikely to take. An ``exec`` closes both ends."""
    lowest = min(LOWEST_NUMBER, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - LAST)
    ends = os.pipe()
    read, write = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, lowest) for each in ends)
    for each in ends:
        os.close(each)
    return read, write


class Channel:
    """The writing end. Nothing is written if user code has put another file in its place."""

    def __init__(self, number: int, reader_takes_s: float | None = None) -> None:
        """Wait for the reader at most ``reader_takes_s`` per piece; None: for ever."""
        os.set_inheritable(number, False)
        self._number, self._pipe = number, os.fstat(number).st_ino
        self._owner, self._reader_takes_s = os.getpid(), reader_takes_s
        self._whole = True

    @property
    def forked(self) -> bool:
        """Tell if this is a copy in a process that user code forked."""
        return os.getpid() != self._owner

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; do nothing if the reader is gone."""
        start = b"" if self._whole else b"\n"  # an exception of the user's interrupted the last line
        line = memoryview(start + msgspec.json.encode(message) + b"\n")  # whose parts are no copies
        try:
            if os.fstat(self._number).st_ino != self._pipe:
                return
            self._whole = False
            while line:
                if not select.select([], [self._number], [], self._reader_takes_s)[1]:
                    return
                line = line[os.write(self._number, line[: select.PIPE_BUF]) :]
            self._whole = True
        except OSError:
            self._whole = True


def lines_of(number: int, ended: Callable[[], bool], tick_s: float) -> Iterator[bytes | float]:
    """Yield the lines, and at every tick the clock (`time.monotonic`) up to which all was read.

    It ends with the writing process, not with the pipe: user code may close the pipe, and a process that it
    forked may keep it open.
    """
    os.set_blocking(number, False)
    poller = select.poll()
    poller.register(number, select.POLLIN)
    rest: list[bytes] = []  # of a line; a chunk is copied once, however long its line is
    while True:
        looked, last = time.monotonic(), ended()
        try:
            chunk = os.read(number, 1 << 20)
        except BlockingIOError:
            chunk = None
        if chunk:
            *whole, tail = chunk.split(b"\n")
            for part in whole:
                yield b"".join([*rest, part])
                rest = []
            rest.append(tail)
        elif last:
            return
        else:
            yield looked
            if chunk is None:
                poller.poll(tick_s * 1e3)
            else:
                time.sleep(tick_s)
