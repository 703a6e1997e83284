"""Hold back a worker's stderr: Python warnings, log records, lines of native code."""

from __future__ import annotations

import fcntl
import os
import re
from collections import Counter
from contextlib import suppress

MOST = 1 << 20
"""Last bytes that are held back, and size of the pipe: the largest of Linux (/proc/sys/fs/pipe-max-size)."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Printed:
    """Stderr of one examination's workers."""

    def __init__(self) -> None:
        self.failed = False
        """Whether a worker crashed."""
        self.cut = False
        """Whether more was printed than `MOST`."""
        self._held = bytearray()

    def pipe(self) -> tuple[int, int]:
        """Make a pipe for one worker, with a read end that does not block."""
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        with suppress(OSError):  # the user's pipes may not take more
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, MOST)
        return read_end, write_end

    def take(self, read_end: int) -> None:
        """Read the bytes that arrived, up to `MOST`: a process may print forever."""
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
        """List the lines; of one that was overwritten (a progress bar) the last state."""
        text = COLOURS.sub("", self._held.decode(errors="replace"))
        return [line.rstrip("\r").split("\r")[-1] for line in text.split("\n")]

    def counted(self) -> list[str]:
        """List each line once, with its count."""
        counts = Counter(line for line in self.lines() if line.strip())
        return [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
