"""The stages of an examination in users' words, its progress, and the line on stderr that shows it."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from threading import Event, Thread


class Stage(StrEnum):
    """A stage of the examination, in order."""

    LOADING = "loading the model"
    LOOKING = "looking at it"
    FORWARD = "watching a forward of a copy"
    BUILDING = "building and compiling variants of its step"
    TIMING = "timing the variants in turn"
    PROFILING = "profiling the variants that are compared"


STEPS, WARMUP = 10, 5
"""Steps that `run` times, and those of its warm-up. The range of ten times holds the true median with 98%
(`fp8doctor.analysis.significance`). Compilation and the allocator settle within five steps (H200)."""

BUDGET_S = 90.0
"""Default budget in seconds. The stages before the trial took 19 to 30 s on eight jobs. After a load of 25 s,
90 s leave out compiled BF16 or the variant with all fixes in one of nine recorded trials; 60 s would leave
one of them out in all nine (H200, torch 2.11)."""


@dataclass(frozen=True)
class Doing:
    """The current activity."""

    text: str
    """Completes "while ..."."""
    stage: Stage | None = None
    """None for an activity outside the stages, always shown."""
    left_s: float | None = None
    """Estimated seconds left; None if unknown."""


class Teller:
    """Reports a trial's activity, with its stage and remaining budget."""

    def __init__(self, tell: Callable[[Doing, str | None], object], end: float) -> None:
        """Take the callback and the budget's end (``time.monotonic``)."""
        self._tell, self._end = tell, end
        self._stage: Stage | None = None

    def begin(self, stage: Stage) -> None:
        self._stage = stage
        self.say(stage.value, None)

    def say(self, text: str, arm: str | None) -> None:
        self._tell(Doing(text, self._stage, self._end - time.monotonic()), arm)


class Course:
    """The progress of an examination."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._ends: float | None = None
        self._begun: set[Stage | None] = set()
        self._doing = "starting"

    def take(self, doing: Doing) -> bool:
        """Record an activity; return whether it begins a stage or is outside of them."""
        is_new = doing.stage not in self._begun
        self._begun |= {doing.stage} - {None}
        self._doing = doing.text
        self._ends = None if doing.left_s is None else time.monotonic() + doing.left_s
        return is_new

    def clock(self) -> str:
        """Format the elapsed time and, if there is a budget, the expected total."""
        spent = f"{time.monotonic() - self._began:.0f} s"
        return spent if self._ends is None else f"{spent} of about {self._ends - self._began:.0f} s"

    def line(self) -> str:
        """Format the start of a stage for output without a clock."""
        return self._doing if self._ends is None else f"{self._doing} ({self.clock()})"

    def fitted(self, columns: int, dot: str = "·") -> str:
        """Fit activity and clock into this many columns; the end of the activity is cut first."""
        words, clock = self._doing, f" {dot} {self.clock()}"
        room = max(0, columns - len(clock))
        return (words if len(words) <= room else f"{words[: max(0, room - 3)]}...") + clock


REFRESHED_S = 0.5
"""Seconds between updates of the clock."""


@contextmanager
def progress_line(*, ascii: bool = False) -> Iterator[Callable[[Doing], None]]:
    """Yield a function that overwrites the progress line; remove the line at the end."""
    course, dot, ended = Course(), "-" if ascii else "·", Event()

    def show() -> None:
        columns = shutil.get_terminal_size().columns - 1
        line = "" if ended.is_set() else course.fitted(columns, dot)
        with suppress(OSError, ValueError):  # closed, or without its terminal
            print(f"\r{line:<{columns}}", end="\r" if ended.is_set() else "", file=sys.stderr, flush=True)

    def tick() -> None:
        while not ended.wait(REFRESHED_S):
            show()
        show()

    def tell(doing: Doing) -> None:
        course.take(doing)
        show()

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        ended.set()
        thread.join()


def someone_watches() -> bool:
    """Check whether stderr is a terminal or a notebook cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" or (sys.stderr is not None and sys.stderr.isatty())
