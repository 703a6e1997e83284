"""Hold back a worker's stderr: Python warnings, log records, lines of native code."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter

MOST = 1 << 20
"""Bytes that are held back: a process may print forever."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Printed:
    """Stderr of one examination's workers, in a file without a name."""

    def __init__(self) -> None:
        self.failed = False
        """Whether a worker crashed."""
        self.cut = False
        """Whether more was printed than `MOST`."""
        self.file = tempfile.TemporaryFile("a+b")  # noqa: SIM115

    def limit(self) -> None:
        """Forget all that was printed if it is too much."""
        if os.fstat(self.file.fileno()).st_size > MOST:
            self.file.truncate(0)
            self.cut = True

    def lines(self) -> list[str]:
        """List the lines; of one that was overwritten (a progress bar) the last state."""
        self.file.seek(0)
        text = COLOURS.sub("", self.file.read().decode(errors="replace"))
        return [line.rstrip("\r").split("\r")[-1] for line in text.split("\n")]

    def counted(self) -> list[str]:
        """List each line once, with its count."""
        counts = Counter(line for line in self.lines() if line.strip())
        return [line if count == 1 else f"{line} ({count} times)" for line, count in counts.items()]
