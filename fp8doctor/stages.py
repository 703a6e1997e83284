"""The stages of an examination in a user's words, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """What is done, one after the other."""

    LOADING = "loading the model"
    LOOKING = "looking at it"
    SHAPES = "timing its matmuls alone"
    BUILDING = "building and compiling variants of its step"
    TIMING = "timing the variants in turn"
    PROFILING = "profiling the variants that are compared"
    MORE = "asking more of what was timed"

    @property
    def number(self) -> int:
        """Which of all stages it is, from 1."""
        return tuple(Stage).index(self) + 1


OF_TRIAL = tuple(Stage)[2:]
"""The stages of a trial, which has a budget; those before it take as long as they take."""

BEFORE_TRIAL = len(Stage) - len(OF_TRIAL)

BUDGET_S, LONG_BUDGET_S = 90.0, 120.0
"""Seconds of a command that is given none; the latter for a model of `LARGE` parameters, and where one graph
of several blocks is compiled: 12 blocks in FP8 compile for 46 s, in BF16 for 15 s (H100, torch 2.11). Before
its trial a command took 19 to 30 s on eight jobs. Of nine recorded trials, after a load of 25 s, the default
leaves out compiled BF16 or the variant with all fixes in one; 60 s would in all."""

LARGE = 6.5e9
"""Parameters: what is called a 7B has 6.7 (Llama) to 7.6 billion (Qwen2.5). A Llama 8B, compiled by block,
had no time for two of five variants in 60 s (H200, torch 2.11)."""

ABOUT = 1.1
"""Multiple of a time up to which it is about that time."""


@dataclass(frozen=True)
class Doing:
    """What is done now."""

    text: str
    """Completes "while ..."."""
    stage: int = 0
    """The number of its stage; 0 for what is of none, and is told by itself."""
    stages: int = 0
    left_s: float | None = None
    """About how many seconds are left; None where nobody knows."""


class Teller:
    """Tells what a trial does, with its stage and what its budget leaves."""

    def __init__(self, tell: Callable[[Doing, str | None], object], end: float, *, before: int = 0) -> None:
        """``tell`` takes what is done and the arm that it is done with, ``end`` is that of the budget
        (``time.monotonic``), ``before`` counts the stages before the trial."""
        self._tell, self._end, self._before = tell, end, before
        self._stage = OF_TRIAL[0]

    def begin(self, stage: Stage) -> None:
        """Tell that a stage begins."""
        self._stage = stage
        self.say(stage.value, None)

    def say(self, text: str, arm: str | None) -> None:
        """Tell what is done in the stage."""
        number = self._before + 1 + OF_TRIAL.index(self._stage)
        left_s = self._end - time.monotonic()
        self._tell(Doing(text, number, self._before + len(OF_TRIAL), left_s), arm)


class Course:
    """How far an examination is. The stage never goes back, also where a process begins again."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._ends: float | None = None
        self._stage = 0
        self._doing = Doing("starting")

    def take(self, doing: Doing) -> bool:
        """Take what is done now; whether it begins a stage, or is of none."""
        is_new = not doing.stage or doing.stage > self._stage
        self._doing, self._stage = doing, max(self._stage, doing.stage)
        self._ends = None if doing.left_s is None else time.monotonic() + doing.left_s
        return is_new

    def words(self) -> str:
        """Say what is done, after the number of its stage."""
        doing = self._doing
        return f"{self._stage}/{doing.stages} {doing.text}" if doing.stages else doing.text

    def clock(self) -> str:
        """Say how long it has taken, and how long it is about to take where there is a budget."""
        now = time.monotonic()
        spent = f"{now - self._began:.0f} s"
        if self._ends is None:
            return spent
        about_s = self._ends - self._began
        between = " of" if now - self._began <= ABOUT * about_s else ", longer than"
        return f"{spent}{between} about {about_s:.0f} s"

    def line(self) -> str:
        """Say what begins, for a reader who sees no clock run."""
        return self.words() if self._ends is None else f"{self.words()} ({self.clock()})"

    def fitted(self, columns: int, dot: str = "·") -> str:
        """Say both within so many columns; of what is done the end is left out first."""
        words, clock = self.words(), f" {dot} {self.clock()}"
        room = max(0, columns - len(clock))
        return (words if len(words) <= room else f"{words[: max(0, room - 3)]}...") + clock
