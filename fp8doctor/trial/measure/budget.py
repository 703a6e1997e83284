"""Describe one run of a trial, its device and callbacks, and budget it by one rule.

The rule says what is begun, when a build is given up, and what is kept for the rest. Over 54 trials, of which
30 are in `tests/trial/recorded_trials.py`, it times as many variants as estimates for each recipe and base
did. An alarm ends code that has no time left, even while it compiles.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from fp8doctor.errors import UserError
from fp8doctor.facts import Trial
from fp8doctor.facts.arm_names import LEFT_OUT_FOR_TIME, Reason
from fp8doctor.facts.no_number import NoNumber, did_not_fit
from fp8doctor.stages import Teller
from fp8doctor.trial.copies.step import Place, VariantPlan
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.state.guard import Guard
from fp8doctor.wording import sentence

HARD_LIMIT = 1.25
"""Budgets within which the whole command ends: a build that takes longer is given up, and the parent process
ends a child that overstays. The project's bound."""

LEAST_SHARE = 0.5
"""Share of the budget that the trial has however long the import and the load took. A choice: a model that
loads for minutes is timed too."""

REPORT_S, CLOSING_S, ENDING_SHARE = 4.0, 1.2, 0.12
"""Seconds kept for the report, seconds kept before it to let go of the GPU, and the share of a small budget
that both are at most. A process that lets go of a GPU has 2 s (`fp8doctor.worker.parent.GRACE_S`)."""

ROUNDS_SHARE = 0.2
"""Share of the budget for rounds that nothing depends on: 15 were no better than 6 (Llama 3B)."""

UNKNOWN_BUILD_S = 10.0
"""Build of a variant that compiles if none of its kind was built: 4 to 13 s by block (H200, torch 2.11)."""

LEAST_WARM_UP = 3
"""Least steps of a variant before it is timed."""

PROFILE_STEPS, PROFILE_S, SHOWN_STEPS = 6.0, 0.3, 4.0
"""Steps and seconds of a profile at each depth (seen: 3 to 9 steps, with warm-up and reading), and steps at
every depth that a variant's profile or proof takes in the mean."""


@dataclass(frozen=True)
class Budget:
    """The seconds of one command, or of one trial in a user's process. All clocks are ``time.monotonic``."""

    seconds: float
    began: float = field(default_factory=lambda: time.monotonic())
    uncounted_s: float = 0.0
    """Seconds of the load before that, which do not count."""

    @classmethod
    def since(cls, began: float, seconds: float, deadline: float | None = None) -> Budget:
        """Make the budget of a command that began at this clock for a trial that begins.

        What was done before counts, but leaves the trial `LEAST_SHARE`. A trial that begins again has the
        ``deadline`` of the first, whatever that leaves.
        """
        counted = max(began, time.monotonic() - (1.0 - LEAST_SHARE) * seconds)
        if deadline is not None:
            counted = min(counted, deadline - cls(seconds, 0.0).deadline)
        return cls(seconds, counted, uncounted_s=counted - began)

    @property
    def end(self) -> float:
        return self.began + self.seconds

    @property
    def last(self) -> float:
        """The clock at which the whole command has to be over."""
        return self.began + HARD_LIMIT * self.seconds

    @property
    def deadline(self) -> float:
        """The clock at which the parent process ends the trial, to report what was sent."""
        return self.last - self.ending_s * REPORT_S / (CLOSING_S + REPORT_S)

    @property
    def elapsed_s(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self.began + self.uncounted_s

    def left_out(self, why: Reason) -> NoNumber:
        return NoNumber(why, did_not_fit(self.seconds))

    @property
    def ending_s(self) -> float:
        """The seconds from the last proof to the end of the command."""
        return min(CLOSING_S + REPORT_S, ENDING_SHARE * self.seconds)

    def after_rounds_s(self, attempts: Iterable[Attempt]) -> float:
        return SHOWN_STEPS * sum(each.steps_s for each in attempts) + self.ending_s

    def reserve_s(self, built: Sequence[Attempt]) -> float:
        """Sum up the least rounds, with one more variant like the first, and what follows them."""
        every = [*built, *built[:1]]
        return timer.LEAST_ROUNDS * sum(map(_round_s, every)) + self.after_rounds_s(every)

    def build_until(self, built: Sequence[Attempt]) -> float:
        """Return the clock at which the next build is given up, to time all others.

        While no step is known, half of the time beyond the budget is kept for that.
        """
        return self.last - self.reserve_s(built) if built else (self.end + self.last) / 2 - self.ending_s

    def no_time_for(
        self, plan: VariantPlan, built: Sequence[Attempt], *, own_process: bool = True
    ) -> NoNumber | None:
        """Explain why a variant is not begun; None if it is.

        One that decides is begun as long as all can still be timed within the hard limit. Any other has to
        fit into the budget if it builds as long as the slowest of its kind, and so has one that decides into
        the hard limit in a user's process, where no alarm gives a build up.
        """
        now = time.monotonic()
        if now >= (self.build_until(built) if plan.place.decides else self.end):
            return self.left_out(Reason.NO_TIME_LEFT)
        decides, first = plan.place.decides, not built or plan.place is Place.OWN_BF16
        if first or (decides and own_process):
            return None
        until = self.last if decides else self.end
        fits = now + build_s(plan, built) + self.reserve_s(built) <= until
        return None if fits else self.left_out(Reason.NOT_EXPECTED_TO_FIT)

    def rounds(self, attempts: Sequence[Attempt]) -> timer.Limits:
        after_s = self.after_rounds_s(attempts)
        soon = min(time.monotonic() + ROUNDS_SHARE * self.seconds, self.end - after_s)
        return timer.Limits(soon, self.last - after_s)

    def profile_fits(self, attempt: Attempt) -> bool:
        profile_s = PROFILE_S * len(attempt.ready) + PROFILE_STEPS * attempt.steps_s
        return time.monotonic() + profile_s <= self.last - self.ending_s

    def enough_s(self, attempts: Sequence[Attempt]) -> float | None:
        """Return the budget, in tens of seconds, for the variants that were left out for time.

        For those that decide, if there are any, else for all; None if none was left out. A build may take
        twice as long as its like, without its caches; one that was given up comes once more.
        """
        left = [each for each in attempts if each.why in LEFT_OUT_FOR_TIME]
        left = [each for each in left if each.plan.place.decides] or left
        built = [each for each in attempts if each.ready]
        if not left or not built:
            return None
        builds_s = sum(max(2 * build_s(each.plan, built), each.build_s) for each in left)
        ending_s = CLOSING_S + REPORT_S - self.ending_s
        all_s = self.elapsed_s + builds_s + self.reserve_s([*built, *built[:1] * (len(left) - 1)]) + ending_s
        return 10.0 * math.ceil(all_s / 10.0)


def build_s(plan: VariantPlan, built: Sequence[Attempt]) -> float:
    """Estimate the seconds of a build: of the slowest of its kind that compiled, or of some eager steps."""
    base = next((each for each in built if each.plan.name == plan.base), None)
    if not (plan.compiled or (base is not None and base.compiled)):
        return (LEAST_WARM_UP + 1) * min((each.steps_s for each in built), default=0.0)
    alike = [each.build_s for each in built if each.compiled and each.plan.by_block == plan.by_block]
    return max(alike, default=UNKNOWN_BUILD_S)


def _round_s(attempt: Attempt) -> float:
    steps = [ready.step_s for ready in attempt.ready]
    blocks = timer.blocks([1e3 * step for step in steps])
    return sum(block.steps * step for step, block in zip(steps, blocks, strict=True))


AGAIN_S = 0.05
"""Seconds until the alarm comes again, because it was deferred or a destructor swallowed `Overrun`."""

UNSAFE = frozenset({"__enter__", "__exit__", "__torch_dispatch__", "__torch_function__"})
"""Functions that an exception must not leave: it keeps a mode of torch on, so later steps raise, or ends the
process in a C++ destructor (compilations that were interrupted at random, torch 2.13, a CPU)."""


class Overrun(BaseException):
    """No time is left. No `Exception`: the compiler, or user code, would catch it."""


@contextmanager
def abort_after(at: float, *, interrupts: bool) -> Iterator[None]:
    """Raise `Overrun` inside when the clock passes ``at``, even while compiling.

    Only in the main thread, which handles signals, and only with ``interrupts``: a user's process has alarms
    of its own. A call into C++ ends first, an `UNSAFE` function too, and what cleans up after `Overrun`.
    """
    in_time = at - time.monotonic()
    if not interrupts or math.isinf(at) or threading.current_thread() is not threading.main_thread():
        yield
        return

    armed = [True]

    def over(number: int, frame: FrameType | None) -> None:
        error = sys.exception()
        while error is not None and not isinstance(error, Overrun):  # is one on its way out?
            error = error.__context__
        callers = set[str]()
        while frame is not None:
            callers.add(frame.f_code.co_name)
            frame = frame.f_back
        if armed and error is None and UNSAFE.isdisjoint(callers):
            raise Overrun

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(in_time, 1e-3), AGAIN_S)
        yield
    finally:
        try:
            armed.clear()
        finally:  # the alarm may come before that
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


@dataclass
class TrialRun:
    device: torch.device
    budget: Budget
    teller: Teller = field(default_factory=lambda: Teller(lambda *_: None, math.inf))
    """Receives each stage and activity, and the variant that it is about."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """Variant or part that is left out -> the reason, after it crashed an earlier process."""
    keep: Callable[[Trial], object] = lambda *_: None
    """Receives the partial trial before each optional part starts."""
    own_process: bool = False
    """Whether the process runs only this trial, and is not the user's."""
    guard: Guard | None = None
    """Watches for writes to the user's objects in every step."""
    apart_gib: float = 0.0
    """What the job holds on the device apart from its model, if the process is not the user's."""

    def trial(self, **fields: Any) -> Trial:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        fields = {"gaps": {}, **fields}
        return Trial(device=self.device.type, gpu=gpu, budget_s=self.budget.seconds, **fields)

    def without_times(self, no_number: NoNumber) -> Trial:
        why = {"why": no_number.why, "reason": no_number.sentence, "reliable": False}
        return self.trial(blocks={}, arms=(), self_check_ratio=None, **why)


def choose_device(name: str | None) -> torch.device | None:
    """Return the named device, else the current CUDA device, else None.

    Raises `UserError` for a name that is no device here.
    """
    if name is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{name!r} is not a device; write cuda, cuda:1 or cpu") from None
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = torch.cuda.current_device() if count and device.index is None else device.index or 0
    if device.type != "cuda" or index >= count:
        here = f"torch sees {count or 'no'} CUDA devices here"
        raise UserError(f"{name!r} cannot be timed on, {here}; write cuda, cuda:1 or cpu")
    return torch.device("cuda", index)


class DeviceLost(BaseException):
    """A variant or part of the trial, ``arm``, left the GPU unusable (sticky error).

    No `Exception`: nothing that goes on without the variant may catch it.
    """

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm = arm


def still_there(device: torch.device, part: str) -> None:
    """Raise `DeviceLost` if ``part`` of the trial left the GPU's context unusable."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(part, f"it took the GPU's context down: {sentence(error)}") from error
