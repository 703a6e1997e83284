"""Count optimizer steps in the script's process, open the window, examine the job.

Two hooks stay to the end, on torch's optimizers and on the registration of modules: compiled code guards them
and would recompile.
"""

import gc
import os
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts, NotFinite, Target, recorded
from fp8doctor.loading.job import Job
from fp8doctor.loading.synthetic_batch import core
from fp8doctor.running.examination import examined, timed, without_a_step
from fp8doctor.running.long_watch import LongWatch
from fp8doctor.running.losses import Losses
from fp8doctor.running.patches import unnoticed, without_own_frames
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.running.step_profiler import CUT_SHORT, StepProfiler
from fp8doctor.running.step_window import StepWindow
from fp8doctor.running.stepped_model import LiveObjects, owner_of
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks.looking import parameters_in
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.wording import error_in_words, plural

LONGEST_WARMUP = 4
"""Longest warm-up while steps still compile, in multiples of the requested one. A choice."""

PROFILED_STEPS = 2
"""Steps after the window until one of them is profiled."""


@dataclass
class Stepper:
    """What is known of an optimizer that has stepped."""

    elements: int
    """Of all parameters."""
    steps: int = 0


class ScriptObserver:
    """Watches the steps of one process: warm-up, a window, a profiled step, and then nothing or `long`."""

    def __init__(self, send: Callable[[Message], None], settings: WatchOptions) -> None:
        self.send, self.settings, self.process = send, settings, os.getpid()
        self.target = Target(kind="script", name=settings.script, attribute=None, module=settings.module)
        self.living = LiveObjects()
        self.watch = ConversionWatch(self.living.note)
        self.sees_conversions = True
        self.losses = Losses()
        self.steppers: weakref.WeakKeyDictionary[Optimizer, Stepper] = weakref.WeakKeyDictionary()
        self.all_steps = 0
        self.main: Stepper | None = None
        """The active optimizer with the most parameters."""
        self.examined: Stepper | None = None
        """The optimizer whose model the facts describe."""
        self.window: StepWindow | None = None
        self.recording: StepProfiler | None = None
        """Profiles a step after the window."""
        self.long: LongWatch | None = None
        """Watches to the end, if asked."""
        self.facts: Facts | None = None
        """All facts so far."""
        self.job: Job | None = None
        """The examined job, kept for a trial."""
        self.complete = self.done = False
        self.timing = self.stopping = False
        self.frames = self.frames_before = frames_compiled()

    @property
    def steps(self) -> int:
        return self.main.steps if self.main is not None else 0

    def install(self) -> None:
        self.begin()
        self.handle = register_optimizer_step_post_hook(self.hook)

    def begin(self) -> None:
        self.watch.__enter__()
        self.losses.begin()
        if (self.settings.stop_on_nan or self.settings.health) and not self.settings.stop:
            self.long = LongWatch(self.settings, self.send, self.losses)

    def conversions_end(self) -> None:
        """Stop watching conversions: compiled code, which guards hooks, will run."""
        self.watch.__exit__(None, None, None)

    def release(self) -> None:
        """End the watching, whether or not the window has ended."""
        self.conversions_end()
        if not self.done:
            self.give_up("the training was not watched to its end")
        if self.long is not None:
            self.long.ended()

    def hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step; torch calls this after each one, and compiled code skips it."""
        if torch.compiler.is_compiling() or self.timing:  # a step of a copy
            return
        if self.stopping:
            raise SystemExit(0)
        try:
            self.stepped(optimizer)
        except BaseException as error:  # a handler of the script's raised it
            without_own_frames(error)
            raise

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step. Failures never reach the script, nor steps of a fork us."""
        if os.getpid() != self.process:
            return
        if self.settings.stop or not self.done:
            with signals_deferred():
                self.guarded(lambda: self.note(optimizer))
            if self.settings.stop and self.stops_now():
                self.guarded(self.stop)
                self.stopping = True
                raise SystemExit(0)
        if self.long is not None:
            self.long.stepped(optimizer, sample=self.done)

    def stops_now(self) -> bool:
        """Tell if the script stops here: after the watching, or where all ranks are sure to have watched.

        Ranks that stopped at different steps would wait for each other; to ask them is a collective.
        """
        if self.settings.rank is None:
            return self.done
        last = LONGEST_WARMUP * max(1, self.settings.warmup) + self.settings.steps + PROFILED_STEPS
        return self.all_steps >= last * max(1, len(self.steppers))

    def guarded(self, part: Callable[[], object]) -> None:
        """Run a part of the watching; a failure is reported and ends the watching."""
        told = "fp8doctor could not watch any further"
        with unnoticed(lambda error: self.give_up(f"{told}: {error_in_words(error)}")):
            part()

    def note(self, optimizer: Optimizer) -> None:
        if (stepper := self.steppers.get(optimizer)) is None:
            elements = sum(each.numel() for each in parameters_in(optimizer))
            stepper = self.steppers[optimizer] = Stepper(elements)
        stepper.steps += 1
        self.all_steps += 1
        if self.done:
            return
        if self.facts is None:
            self.send(Message(stepped=True))
            self.examine_early(stepper, optimizer)
        main = max(self.steppers.values(), key=lambda each: each.elements)
        if main is not self.main:  # a window is of one alone
            self.main = main
            self.cut_short("another optimizer began to step")
            self.window = None
        if stepper is not main:
            return
        if self.recording is not None:
            if self.recording.stepped():
                self.finish(self.recording)
        elif self.window is not None:
            if self.window.stepped():
                self.close(optimizer)
        elif not self.done:
            self.warm_up(main, optimizer)
        if self.long is None:  # which reads them next
            self.losses.next_step(keep=stepper.steps)

    def warm_up(self, main: Stepper, optimizer: Optimizer) -> None:
        """Start the window if enough steps ran and the last one compiled nothing."""
        before, self.frames, least = self.frames, frames_compiled(), self.settings.warmup
        compiles = before != self.frames and main.steps < LONGEST_WARMUP * max(1, least)
        if main.steps < least or compiles:
            return
        if self.examined is not main:
            self.examine_early(main, optimizer)
        found = owner_of(optimizer, self.living)
        self.window = StepWindow(
            self.settings.steps,
            found,
            self.losses,
            keep=self.settings.budget_s is not None,
            function=self.frames > self.frames_before and found is not None and not found.compiled,
        )
        self.window.begin()

    def examine_early(self, stepper: Stepper, optimizer: Optimizer) -> None:
        self.examined = stepper
        self.examine(optimizer, None)
        collect()  # what was looked at refers to itself, and would keep a model that the script deletes
        self.tell()

    def examine(self, optimizer: Optimizer, window: StepWindow | None) -> None:
        found, watch = owner_of(optimizer, self.living), self.watch if self.sees_conversions else None
        job, self.facts = examined(self.target, found, optimizer, window, watch)
        if window is not None and found is not None:
            self.name_others(found.model, optimizer)
        if window is not None and self.settings.budget_s is not None:
            self.job = job
        if self.long is not None:
            self.long.know(found, optimizer)

    def name_others(self, model: nn.Module, main: Optimizer) -> None:
        """Name the models that train beside the one of the main optimizer, which alone is examined."""
        owners = [owner_of(each, self.living) for each in self.steppers if each is not main]
        others = {id(each.model): each.model for each in owners if each and each.model is not model}
        if others:
            first, *beside = (type(core(each)).__name__ for each in (model, *others.values()))
            self.send(Message(note=f"only {first} was examined; {', '.join(beside)} trained beside it"))

    def close(self, optimizer: Optimizer) -> None:
        assert self.window is not None  # `forget` has to find the last reference to it
        self.window.end()
        observation = self.window.observation()
        assert observation is not None  # the fewest steps that can be asked for are enough
        self.examine(optimizer, self.window)
        assert self.facts is not None
        self.facts = replace(self.facts, observed=observation)
        self.forget()
        self.complete = True
        self.tell()
        step_ms = statistics.median(observation.steps_ms)
        self.recording = StepProfiler(on_gpu=observation.clock == "cuda", step_ms=step_ms)
        self.recording.begin()
        if self.recording.problem is not None:
            self.finish(self.recording)

    def finish(self, recording: StepProfiler) -> None:
        """Add the profiled step, and stop watching."""
        assert self.facts is not None
        self.recording, self.done = None, True
        if self.long is None:  # which reads them to the end
            self.losses.end()
        observed, gaps = self.facts.observed, self.facts.get("gaps", {})
        if recording.problem is None:
            observed = recording.added_to(observed)
        if recording.problem is not None:
            gaps = {**gaps, **dict.fromkeys(("observed.breakdown", "observed.fp8_gemms"), recording.problem)}
            self.send(Message(note=f"no step was profiled: {recording.problem}"))
        self.facts = replace(self.facts, observed=observed, gaps=gaps)
        self.tell()
        if not self.settings.stop:
            self.send(Message(watched=self.steps))

    def stop(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the other ranks may still need this one in their last exchange
        if not self.settings.rank:
            said = f"the script was stopped after {plural(self.steps, 'step')}, as --stop asks"
            self.send(Message(note=said))
        self.time_copies()

    def time_copies(self) -> None:
        """Add a trial to the facts, and release the job."""
        job, self.job = self.job, None
        if job is not None and self.facts is not None:
            self.timing = True
            try:
                self.facts = timed(job, self.facts, self.settings, self.send)
            finally:
                self.timing = False
            self.tell()

    def paused(self) -> None:
        """Leave out what ran between two steps."""
        if self.window is not None:
            self.guarded(self.window.begin_step_again)
        elif self.recording is not None and self.recording.started:
            self.guarded(lambda: self.cut_short("an evaluation or a save ran in the step to profile"))

    def forget(self) -> None:
        self.window = None
        self.watch.rest()
        self.living.forget()
        collect()

    def cut_short(self, why: str) -> None:
        """End a window, or a profile and report without it."""
        if self.window is not None:
            self.window.end()
        if self.recording is not None:
            self.recording.end(why)
            self.finish(self.recording)

    def give_up(self, why: str) -> None:
        self.done = True
        self.cut_short(why)
        if self.long is None:
            self.losses.end()
        self.forget()
        self.send(Message(note=why))

    def failed(self) -> None:
        """Examine a script that failed before its first step."""
        if self.facts is None and not self.done:
            self.facts = without_a_step(self.target, self.living)
            self.tell()

    def closed(self) -> int:
        """Report an unfinished window at the end. Return the main optimizer's steps."""
        if self.long is not None:
            self.guarded(self.long.ended)
        self.cut_short(CUT_SHORT)
        self.losses.end()
        told, self.done = self.facts, True
        if told is None:
            return self.steps
        observation = self.window.observation() if self.window is not None else None
        if observation is not None:
            self.facts = replace(told, observed=observation)
        if observation is not None or (self._not_finite() and not recorded(told, "not_finite")):
            self.tell()
        return self.steps

    def _not_finite(self) -> NotFinite | None:
        """Return the first step that was not finite so far, None if none was seen. Waits for the GPU."""
        if self.long is not None and (bad := self.long.found) is not None:
            what: Literal["loss", "gradients"] = "loss" if bad.what == "loss" else "gradients"
            where = bad.sentence.partition("is not finite.")[2].strip()
            return NotFinite(step=bad.step, what=what, where=where)
        step = self.losses.first_bad()
        return None if step is None else NotFinite(step=step, what="loss", where="")

    def tell(self) -> None:
        """Send all facts so far, with the first step that was not finite."""
        assert self.facts is not None
        if (found := self._not_finite()) is not None:
            self.facts = replace(self.facts, not_finite=found)
        self.send(Message(facts=self.facts.to_dict(), complete=self.complete))


def collect() -> None:
    """Collect garbage, unless the script has disabled the collector."""
    if gc.isenabled():
        gc.collect()
