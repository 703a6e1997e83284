"""Count optimizer steps in the script's process, open the window, examine the job.

Hooks stay to the end, on torch's optimizers and on the registration of modules: compiled code guards them and
would recompile.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch.optim import optimizer as hooks
from torch.optim.optimizer import Optimizer

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.facts import Facts, NotFinite, Target, recorded
from fp8doctor.loading.job import Job
from fp8doctor.pipes import Channel
from fp8doctor.running.examination import ScriptExaminer
from fp8doctor.running.long_watch import LongWatch
from fp8doctor.running.losses import Losses, spoiled_weight
from fp8doctor.running.patches import unnoticed, without_own_frames
from fp8doctor.running.script_messages import Listener, Message, WatchOptions
from fp8doctor.running.step_profiler import CUT_SHORT, StepProfiler
from fp8doctor.running.step_window import StepWindow
from fp8doctor.running.stepped_model import LiveObjects, Ownership, Stepper, Steppers, only_trainer, owner_of
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.wording import error_in_words, plural, sentence

_log = logging.getLogger("fp8doctor")

LONGEST_WARMUP = 4
"""Longest warm-up while steps still compile, in multiples of the requested one. A choice."""

READER_TAKES_S = 10.0
"""Seconds that a script waits at most for the reader of a message's next piece. A choice: it only reads."""

PROFILED_STEPS = 2
"""Steps after the window until one of them is profiled."""


class ScriptObserver:
    """Watches the steps of one process: warm-up, a window, a profiled step, and then nothing or each step."""

    def __init__(self, channel: Listener, settings: WatchOptions) -> None:
        self.channel, self.settings = channel, settings
        self.living = LiveObjects()
        self.watch = ConversionWatch(self.living.note)
        self.examination = ScriptExaminer(settings, self.watch, channel.send)
        self.losses = Losses()
        self.long: LongWatch | None = None
        """Looks at each step to the end, if asked."""
        self.steppers = Steppers()
        self.main: Stepper | None = None
        """The active optimizer with the most parameters."""
        self.phase: StepWindow | StepProfiler | None = None
        """The window, then the profile of a step; None before, and after."""
        self.facts: Facts | None = None
        """All facts so far."""
        self.model: Callable[[], Any] = lambda: None
        """The model that they describe, while it lives."""
        self.job: Job | None = None
        """The examined job, kept for a trial."""
        self.complete = self.done = False
        self.timing = self.stopping = False
        self.frames = self.frames_before = frames_compiled()
        self.handles: list[Any] = []

    @property
    def steps(self) -> int:
        return self.main.steps if self.main is not None else 0

    @property
    def window(self) -> StepWindow | None:
        return self.phase if isinstance(self.phase, StepWindow) else None

    def install(self) -> None:
        """Watch by a hook of torch's."""
        self.begin()
        self.handles.append(hooks.register_optimizer_step_post_hook(self.after_step))

    def begin(self, target: Target | None = None, *, converted: bool = False) -> None:
        """Watch conversions and losses; ``converted`` if a conversion happened before."""
        if target is not None:
            self.examination.target = target
        if converted:
            self.examination.watch = None
        self.watch.__enter__()
        self.losses.begin()
        if (self.settings.stop_on_nan or self.settings.health) and not self.settings.stop:
            self.long = LongWatch(self.settings, self.channel.send, self.losses)
            self.handles.append(hooks.register_optimizer_step_pre_hook(self.before_step))

    def conversions_end(self) -> None:
        """Stop watching conversions: compiled code, which guards hooks, will run."""
        self.watch.__exit__(None, None, None)

    def release(self) -> None:
        """End the watching, whether or not the window has ended."""
        self.conversions_end()
        if not self.done:
            self.give_up("the training was not watched to its end")
        self.stop_watching()
        for each in self.handles:
            each.remove()

    # Hooks

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at the loss; torch calls this before each step."""
        if self.long is None or torch.compiler.is_compiling() or self.timing or self.channel.forked:
            return
        if self.steppers.known.get(optimizer) is self.main:
            with signals_deferred():
                self.guarded(partial(self.long.before_step, self.steps + 1))

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
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
        """Note a step. Failures never reach the script."""
        if self.channel.forked:
            return
        stepper = self.steppers.count(optimizer)
        if self.long is not None or not self.done:
            with signals_deferred():
                self.guarded(partial(self.note, stepper, optimizer))
        if self.settings.stop and self.stops_now():
            self.guarded(self.stop)
            self.stopping = True
            raise SystemExit(0)

    def stops_now(self) -> bool:
        """Tell if the script stops here: after the watching, or where all ranks are sure to have watched.

        Ranks that stopped at different steps would wait for each other; to ask them is a collective.
        """
        if self.settings.rank is None:
            return self.done
        longest = LONGEST_WARMUP * max(1, self.settings.warmup)
        last = longest + self.settings.steps + PROFILED_STEPS
        return self.steppers.all_steps >= last * max(1, len(self.steppers.known))

    def guarded(self, part: Callable[[], object]) -> None:
        """Run a part of the watching; a failure is reported and ends the watching."""
        with unnoticed(
            lambda error: self.give_up(f"fp8doctor could not watch any further: {error_in_words(error)}")
        ):
            part()

    # Steps

    def note(self, stepper: Stepper, optimizer: Optimizer) -> None:
        """Act on the end of a step."""
        if self.facts is None:
            self.channel.send(Message(stepped=True))
            self.examine(optimizer, None)
            collect()  # what was looked at refers to itself, and would keep a model that the script deletes
            self.tell()
        if not self.done:
            self.choose_main()
        if stepper is not self.main:
            return
        if isinstance(self.phase, StepWindow) and self.phase.stepped():
            self.close(optimizer)
        elif isinstance(self.phase, StepProfiler) and self.phase.stepped():
            self.finish()
        elif self.phase is None and not self.done and self.warm(stepper):
            self.open(optimizer)
        if self.long is not None:
            self.long.stepped(optimizer, stepper.steps, sample=self.done)
        else:
            self.losses.next_step(keep=stepper.steps)

    def choose_main(self) -> None:
        """Find the optimizer to watch; a window is of one alone."""
        main = self.steppers.largest()
        if main is not self.main:
            self.cut_short("another optimizer began to step")
            self.phase = None
        self.main = main

    def warm(self, main: Stepper) -> bool:
        """Tell if enough steps ran and the last one compiled nothing."""
        before, self.frames = self.frames, frames_compiled()
        least = self.settings.warmup
        return main.steps >= least and (before == self.frames or main.steps >= LONGEST_WARMUP * max(1, least))

    def examine(self, optimizer: Optimizer, window: StepWindow | None) -> None:
        found = owner_of(optimizer, self.living)
        job, self.facts = self.examination.examined(found, optimizer, window)
        if window is not None and self.settings.budget_s is not None:
            self.job = job
        if found is not None:
            self.model = weakref.ref(found.model)
            if self.long is not None:
                compiled = self.function_compiled(found)
                self.long.know(found.model, optimizer, compiled_function=compiled)

    def function_compiled(self, found: Ownership | None) -> bool:
        """Tell if a function of the script is compiled, which may call the model."""
        return found is not None and not found.compiled and frames_compiled() > self.frames_before

    def open(self, optimizer: Optimizer) -> None:
        """Start the window for the main optimizer's model."""
        found = owner_of(optimizer, self.living)
        self.phase = StepWindow(
            self.settings.steps,
            found,
            self.losses,
            keep=self.settings.budget_s is not None,
            function=self.function_compiled(found),
        )
        self.phase.begin()

    def close(self, optimizer: Optimizer) -> None:
        """Report the window's times, and begin to profile."""
        assert self.window is not None
        self.window.end()
        observation = self.window.observation()
        assert observation is not None  # the fewest steps that can be asked for are enough
        self.examine(optimizer, self.window)
        assert self.facts is not None
        self.facts = replace(self.facts, observed=observation)
        self.complete = True
        self.forget()
        self.tell()
        step_ms = statistics.median(observation.steps_ms)
        self.phase = StepProfiler(on_gpu=observation.clock == "cuda", step_ms=step_ms)
        self.phase.begin()
        if self.phase.problem is not None:
            self.finish()

    def finish(self) -> None:
        """Add the profiled step, and stop watching."""
        assert self.facts is not None
        assert isinstance(self.phase, StepProfiler)
        recording, self.phase, self.done = self.phase, None, True
        if self.long is None:  # which reads them to the end
            self.losses.end()
        observed, gaps = self.facts.observed, self.facts.get("gaps", {})
        try:
            observed = recording.added_to(observed) if recording.problem is None else observed
        except Exception as error:
            _log.debug("the profile tells nothing", exc_info=True)
            recording.problem = sentence(error)
        if recording.problem is not None:
            gaps = {**gaps, **dict.fromkeys(("observed.breakdown", "observed.fp8_gemms"), recording.problem)}
            self.channel.send(Message(note=f"no step was profiled: {recording.problem}"))
        self.facts = replace(self.facts, observed=observed, gaps=gaps)
        self.tell()
        if not self.settings.stop:
            self.channel.send(Message(watched=self.steps))

    def paused(self) -> None:
        """Leave out what ran between two steps."""
        if self.window is not None:
            self.guarded(self.window.begin_step_again)

    def stop(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # the other ranks may still need this one in their last exchange
        if not self.settings.rank:
            said = f"the script was stopped after {plural(self.steps, 'step')}, as --stop asks"
            self.channel.send(Message(note=said))
        self.time_copies()

    def time_copies(self) -> None:
        """Add a trial to the facts, and release the job."""
        job, self.job = self.job, None
        if job is not None and self.facts is not None and self.settings.budget_s is not None:
            self.timing = True
            try:
                self.facts = self.examination.timed(job, self.facts, self.settings.budget_s)
            finally:
                self.timing = False
            self.tell()

    # Ends

    def forget(self) -> None:
        self.phase = None
        self.watch.rest()
        self.living.forget()
        collect()

    def cut_short(self, why: str) -> None:
        """End a window, or a profile and report without it."""
        if isinstance(self.phase, StepProfiler):
            self.phase.end(why)
            self.finish()
        elif self.phase is not None:
            self.phase.end()

    def give_up(self, why: str) -> None:
        self.done = True
        self.cut_short(why)
        if self.long is not None:
            self.long.release()
            self.long = None
        self.losses.end()
        self.forget()
        self.channel.send(Message(note=why))

    def stop_watching(self) -> None:
        if self.long is not None:
            self.long.release()
        self.losses.end()

    def closed(self) -> int:
        """Report an unfinished window at the end. Return the main optimizer's steps."""
        self.stop_watching()
        self.cut_short(CUT_SHORT)
        told, self.done = self.facts, True
        if told is None:
            return self.steps
        observation = self.window.observation() if self.window is not None else None
        if observation is not None:
            self.facts = replace(told, observed=observation)
        if observation is not None or (self.not_finite() and not recorded(told, "not_finite")):
            self.tell()
        return self.steps

    def script_ended(self) -> int:
        """Report what is known at the script's end, also if it fails before its first step."""
        if isinstance(getattr(sys, "last_value", None), Exception):
            self.guarded(self.failed)
        return self.closed()

    def failed(self) -> None:
        if self.facts is None and not self.done:
            self.facts = self.examination.without_a_step(only_trainer(self.living))
            self.tell()

    def not_finite(self) -> NotFinite | None:
        """Return the first step that was not finite so far, None if none was seen. Waits for the GPU."""
        if self.long is not None and self.long.found is not None:
            return self.long.found
        step = self.losses.first_bad()
        if step is None:
            return None
        model = self.model()
        frozen = spoiled_weight(model, frozen=True) if model is not None else None
        return NotFinite(step=step, what="loss", where=str(frozen or ""))

    def tell(self) -> None:
        """Send all facts so far, with the first step that was not finite."""
        assert self.facts is not None
        if (found := self.not_finite()) is not None:
            self.facts = replace(self.facts, not_finite=found)
        self.channel.send(Message(facts=self.facts.to_dict(), complete=self.complete))


def observe(channel: int, settings: str) -> ScriptObserver:
    """Watch this process: send messages to a pipe, and take `WatchOptions` as JSON."""
    observer = ScriptObserver(Channel(channel, READER_TAKES_S), WatchOptions(**json.loads(settings)))
    observer.install()
    return observer


def collect() -> None:
    """Collect garbage, unless the script has disabled the collector."""
    if gc.isenabled():
        gc.collect()
