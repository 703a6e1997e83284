"""What a worker prints on stderr, held back: warnings of Python, records of loggers, lines of native code."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from contextlib import suppress

MOST = 1 << 20
"""Bytes that are held back, the last ones, and that a worker can print before they are read. The largest pipe
that Linux gives (/proc/sys/fs/pipe-max-size)."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Printed:
    """What the workers of one examination printed on stderr."""

    def __init__(self) -> None:
        self.failed = False
        """Whether a worker ended of what it did."""
        self.cut = False
        """Whether more was printed than is held back."""
        self._held = bytearray()

    def pipe(self) -> tuple[int, int]:
        """Make a pipe for one worker, whose end for reading does not wait."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with suppress(OSError):  # the user's pipes may not take more
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, MOST)
        return read_end, write_end

    def take(self, read_end: int) -> None:
        """Take what has arrived. A process that prints for ever is left alone after `MOST` bytes."""
        for _ in range(MOST >> 16):
            try:
                part = os.read(read_end, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                return
            self._held += part
            self.cut = self.cut or len(self._held) > MOST
            del self._held[:-MOST]

    def lines(self) -> list[str]:
        """Tell every line, of one that was written over (a progress bar) what it was last."""
        text = COLOURS.sub("", self._held.decode(errors="replace"))
        return [line.rstrip("\r").split("\r")[-1] for line in text.split("\n")]

    def counted(self) -> list[str]:
        """Tell each line once, with how often it was printed."""
        counts = Counter(line for line in self.lines() if line.strip())
        return [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
