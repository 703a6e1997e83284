"""Profile one of the script's own steps: its kernels and its time breakdown."""

import gc
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace
from torch.autograd.profiler import profile

from fp8doctor.facts import Observation
from fp8doctor.profiling.profiled_step import step_of
from fp8doctor.running.patches import Patch, unnoticed
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.looking import state_of
from fp8doctor.trial.copies.depth import WHOLE
from fp8doctor.trial.measure.evidence import (
    ANOTHER_PROFILER,
    counted,
    detaching,
    exported,
    quiet_profiler,
    why_not_profiled,
)
from fp8doctor.trial.measure.results import breakdown
from fp8doctor.wording import sentence

GAVE_WAY = "another profiler was started in this process"
CUT_SHORT = "there was no more step after the window"

LONGEST_MS = 10_000.0
"""Longest step to profile, in ms. A choice: a host launches 100,000 kernels per second, and the profile of a
million takes 1 GB and ten seconds."""

COPY_FROM_HOST = "Memcpy HtoD"
"""Prefix of host-to-device copies in a trace."""


class StepProfiler:
    """Profiles the step after the next: the first includes the profiler's own set-up.

    A process has one profiler at a time. If the script starts one, this one ends first.
    """

    def __init__(self, *, on_gpu: bool, step_ms: float) -> None:
        self.on_gpu = on_gpu
        self.problem: str | None = _why_not(step_ms)
        """Why nothing is profiled."""
        self.started = False
        self._profile: Any = None
        self._room = Patch(profile, torch_private.PREPARES_PROFILER, lambda theirs: self.end(GAVE_WAY))

    def begin(self) -> None:
        if self.problem is None:
            with unnoticed(self._failed), quiet_profiler():  # without Kineto no kernels are recorded
                device = "cuda" if self.on_gpu else None
                self._profile = profile(use_kineto=True, use_device=device, record_shapes=True)
                getattr(self._profile, torch_private.PREPARES_PROFILER)()
                self._room.begin()

    def stepped(self) -> bool:
        """Note the end of a step. Return whether the profiling is over."""
        if self.problem is None and not self.started:
            self._start()
            return self.problem is not None
        self.end()
        return True

    def _start(self) -> None:
        with unnoticed(self._failed), quiet_profiler():
            if self.on_gpu:
                torch.cuda.synchronize()  # earlier work is not part of the step
            getattr(self._profile, torch_private.STARTS_PROFILER)()
            self.started = True

    def end(self, problem: str | None = None) -> None:
        if self.problem is None:
            if not self.started:
                self._start()  # a prepared profiler cannot be stopped
            self._room.end()
            with unnoticed(self._failed), quiet_profiler(), detaching() if self.on_gpu else nullcontext():
                self._profile.__exit__(None, None, None)
            self.problem = self.problem or problem

    def _failed(self, error: Exception) -> None:
        self.problem = sentence(error)
        self._room.end()

    def added_to(self, seen: Observation) -> Observation:
        """Add the profiled step, unless it is empty."""
        with unnoticed(self._failed):
            trace = exported(self._profile)
            step = step_of(trace, on_gpu=self.on_gpu)
            proof = counted(trace, torch.device("cuda" if self.on_gpu else "cpu"))
            copies = (each.time_ms for each in step.groups if each.name.startswith(COPY_FROM_HOST))
            return replace(
                seen,
                fp8_gemms=proof.fp8_gemms,
                graphs_run=proof.graphs_run,
                host_copies_ms=sum(copies),
                breakdown=breakdown(WHOLE, [step], median(seen.steps_ms)),
            )
        return seen


def _why_not(step_ms: float) -> str | None:
    """Return why no step can be profiled: too long, or the script has a profiler that has not stopped."""
    if step_ms > LONGEST_MS:
        return f"a step takes {step_ms / 1e3:.0f} s, and its profile would be too large"
    if (why := why_not_profiled()) is not None:
        return why
    for each in gc.get_objects():
        if issubclass(type(each), profile):
            state = state_of(each)
            if state.get("entered") and state.get("kineto_results") is None:
                return ANOTHER_PROFILER
    return None
