"""One process of `trial_jobs.py`: told by its stdin, heard by the lines that it prints, and ended with its
group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENDING_S = 10.0
"""Seconds that an interrupted process has to end by itself."""

LOOKS_S = 0.05
"""Seconds between two looks at what a process has printed."""

LAST = 300
"""Characters of what a failed process said that are kept."""


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those of its group. fp8doctor ends its own worker when it is interrupted."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Run:
    """A process, whose stderr goes to ``log`` and whose stdout beside it."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def started(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Run:
        with log.open("w") as errors, log.with_suffix(".out").open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        return cls(process, log)

    def ended(self, limit_s: float) -> str | None:
        """Wait for its end, and return why it failed, or None."""
        try:
            self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end(self.process)
            return f"ended after {limit_s:.0f} s"
        code, said = self.process.returncode, self.log.read_text(errors="replace").strip()
        return None if code == 0 else f"exit {code}: {said[-LAST:]}"

    def tell(self, line: str) -> None:
        """Write a line to its stdin; one that has ended hears nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def has_said(self, lines: int, limit_s: float) -> str | None:
        """Wait until it has printed so many lines, and return why it has not, or None."""
        until = time.monotonic() + limit_s
        while len(self.lines()) < lines:
            if self.process.poll() is not None:
                return self.ended(limit_s) or "it ended early"
            if time.monotonic() > until:
                end(self.process)
                return f"ended after {limit_s:.0f} s"
            time.sleep(LOOKS_S)
        return None

    def lines(self) -> list[str]:
        """Return the whole lines that it has printed."""
        return self.log.with_suffix(".out").read_text().rpartition("\n")[0].splitlines()
