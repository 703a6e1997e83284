"""Count optimizer steps in the script's process, open the window, examine the job.

Two hooks stay to the end, on torch's optimizers and on the registration of modules: compiled code guards them
and would recompile.
"""

from __future__ import annotations

import gc
import logging
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec.structs import replace
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.examine.torch_state import compiled_nothing
from fp8doctor.facts import Facts, NotFinite, Target, recorded
from fp8doctor.loading.job import Job
from fp8doctor.running.examination import ScriptExaminer
from fp8doctor.running.long_watch import LongWatch
from fp8doctor.running.losses import Losses
from fp8doctor.running.patches import without_own_frames
from fp8doctor.running.script_messages import Listener, Message, WatchOptions
from fp8doctor.running.step_profiler import CUT_SHORT, StepProfiler
from fp8doctor.running.step_window import StepWindow
from fp8doctor.running.stepped_model import LiveObjects, held, only_trainer, owner_of
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks.looking import class_name
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.wording import error_in_words, plural, sentence

_log = logging.getLogger("fp8doctor")

LONGEST_WARMUP = 4
"""Longest warm-up while steps still compile, in multiples of the requested one. A choice."""

PROFILED_STEPS = 2
"""Steps after the window until one of them is profiled."""

IDLE_STEPS = 20
"""Forget an optimizer that has been idle for this many steps of the others. A choice: a GAN's critic steps
five times as often as its generator."""


@dataclass
class Stepper:
    """An optimizer that has stepped, or several in turn with the same parameters."""

    first: weakref.ref[Any]
    """Its first parameter."""
    name: str
    elements: int
    """Of all parameters."""
    steps: int = 0
    last: int = 0
    """Number of its last step among all optimizers' steps."""
    closure: bool = False
    """It was given a closure, which may call the model several times."""


class ScriptObserver:
    """Watches the steps of one process: warm-up, a window, a profiled step, and then nothing or `long`."""

    def __init__(self, channel: Listener, settings: WatchOptions) -> None:
        self.channel, self.settings = channel, settings
        self.living = LiveObjects()
        self.watch = ConversionWatch(self.living.note)
        self.examination = ScriptExaminer(settings, self.watch, channel.send)
        self.losses = Losses()
        self.steppers: dict[int, Stepper] = {}
        """By the id of the first parameter."""
        self.all_steps = 0
        """Steps of all optimizers."""
        self.main: Stepper | None = None
        """The active optimizer with the most parameters."""
        self.examined: Stepper | None = None
        """The optimizer whose model the facts describe."""
        self.window: StepWindow | None = None
        self.recording: StepProfiler | None = None
        """Profiles a step after the window."""
        self.long: LongWatch | None = None
        """Watches to the script's end, if asked."""
        self.share = 0.0
        """Share of the stepped parameters that the window's model owns."""
        self.facts: Facts | None = None
        """All facts so far."""
        self.job: Job | None = None
        """The examined job, kept for a trial."""
        self.complete = self.done = False
        self.timing = self.stopping = False
        self.fork_reported = False
        self.frames = self.frames_before = frames_compiled()

    @property
    def steps(self) -> int:
        """Steps of the main optimizer."""
        return self.main.steps if self.main is not None else 0

    def install(self) -> None:
        """Watch conversions and the steps of all optimizers."""
        self.begin()
        if (self.settings.stop_on_nan or self.settings.health) and not self.settings.stop:
            self.long = LongWatch(self.settings, self.channel.send, self.losses)
            self.long.install()
        self.handle = register_optimizer_step_post_hook(self.hook)

    def begin(self, target: Target | None = None, *, converted: bool = False) -> None:
        """Watch conversions; ``converted`` if one happened before."""
        if target is not None:
            self.examination.target = target
        if converted:
            self.examination.watch = None
        self.watch.__enter__()
        self.losses.begin()

    def conversions_end(self) -> None:
        """Stop watching conversions: compiled code, which guards hooks, will run."""
        self.watch.__exit__(None, None, None)

    def release(self) -> None:
        """End the watching, whether or not the window has ended."""
        self.conversions_end()
        if not self.done:
            self.give_up("the training was not watched to its end")

    def ended_early(self) -> int | None:
        """End with the training. Return its steps, or None if the window was watched to its end."""
        steps = self.closed()
        if self.done:
            return None
        self.done = True
        self.forget()
        return steps

    def hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step; torch calls this after each one, and compiled code skips it."""
        if torch.compiler.is_compiling() or self.timing:  # a step of a copy
            return
        if self.stopping:
            raise SystemExit(0)
        if self.done and not self.settings.stop:
            self.all_steps += 1
        else:
            given = (*args[1:], kwargs.get("closure"))  # the first is the optimizer again
            try:
                self.stepped(optimizer, any(each is not None for each in given))
            except BaseException as error:  # a handler of the script's raised it
                without_own_frames(error)
                raise
        if self.long is not None and not self.channel.forked:
            self.long.stepped(optimizer, sample=self.done)

    def stepped(self, optimizer: Optimizer, closure: bool) -> None:
        """Note a step. Failures never reach the script."""
        if self.channel.forked:
            if not self.fork_reported:
                self.fork_reported = True
                self.channel.send(Message(stepped_in_fork=True))
            return
        with signals_deferred():
            self.guarded(lambda: self.step_of(optimizer) if self.done else self.note(optimizer, closure))
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
        return self.all_steps >= last * max(1, len(self.steppers))

    def guarded(self, part: Callable[[], object]) -> None:
        """Run a part of the watching; a failure is reported and ends the watching."""
        try:
            part()
        except Exception as error:
            _log.debug("the observer failed", exc_info=True)
            self.give_up(f"fp8doctor could not watch any further: {error_in_words(error)}")

    def note(self, optimizer: Optimizer, closure: bool) -> None:
        """Count the step, and act on its end."""
        stepper = self.step_of(optimizer)
        stepper.closure = stepper.closure or closure
        if self.facts is None:
            self.channel.send(Message(stepped=True))
            self.examine_early(stepper, optimizer)
        self.choose_main()
        if stepper is not self.main:
            return
        if self.recording is not None:
            if self.recording.stepped():
                self.finish(self.recording)
        elif self.window is not None:
            if self.window.stepped():
                self.close(optimizer, stepper)
        elif self.warm(stepper):
            self.open(stepper, optimizer)

    def step_of(self, optimizer: Optimizer) -> Stepper:
        """Count a step of the optimizer, or of its predecessor with the same parameters."""
        parameters = held(optimizer)
        first = parameters[0] if parameters else optimizer
        stepper = self.steppers.get(id(first))
        if stepper is None or stepper.first() is not first:
            elements = sum(each.numel() for each in parameters)
            stepper = Stepper(weakref.ref(first), class_name(type(optimizer)), elements)
            self.steppers[id(first)] = stepper
        self.all_steps += 1
        stepper.steps += 1
        stepper.last = self.all_steps
        if self.long is None:
            self.losses.next_step(keep=stepper.steps)
        return stepper

    def choose_main(self) -> None:
        """Find the active optimizer with the most parameters; a window is of one alone."""
        self.steppers = {
            key: each
            for key, each in self.steppers.items()
            if each.first() is not None and self.all_steps - each.last < IDLE_STEPS
        }
        main = max(self.steppers.values(), key=lambda each: each.elements)
        if main is not self.main:
            if self.window is not None:
                self.window.end()
                self.window = None
            if self.recording is not None:
                self.recording.end("another optimizer began to step")
                self.finish(self.recording)
        self.main = main

    def warm(self, main: Stepper) -> bool:
        """Tell if enough steps ran and the last one compiled nothing."""
        before, self.frames = self.frames, frames_compiled()
        least = self.settings.warmup
        return main.steps >= least and (before == self.frames or main.steps >= LONGEST_WARMUP * max(1, least))

    def examine_early(self, stepper: Stepper, optimizer: Optimizer) -> None:
        """Examine the job now, in case no more is seen."""
        self.examined = stepper
        found = owner_of(optimizer, self.living)
        self.facts = self.examination.early(found, optimizer)
        if self.long is not None:
            self.long.know(found, optimizer)
        self.collect()  # what was looked at refers to itself, and would keep a model that the script deletes
        self.tell()

    def open(self, main: Stepper, optimizer: Optimizer) -> None:
        """Start the window for the main optimizer's model.

        If a compiled function may call an uncompiled model, a mark on it would recompile the function.
        """
        if self.examined is not main:
            self.examine_early(main, optimizer)
        found = owner_of(optimizer, self.living)
        self.share = found.share if found is not None else 0.0
        function = frames_compiled() > self.frames_before and found is not None and not found.compiled
        self.window = StepWindow(
            self.settings.steps,
            main.steps,
            () if found is None else found.callable,
            model=None if found is None else found.model,
            inside=found.inside if found is not None and compiled_nothing() else (),
            capture=not main.closure,
            keep=self.settings.budget_s is not None,
            mark=not function,
            losses=self.losses,
        )
        self.window.begin()

    def close(self, optimizer: Optimizer, main: Stepper) -> None:
        """End the window and examine the job."""
        assert self.window is not None
        self.window.end()
        observation = self.window.observation(self.names(), self.share)
        assert observation is not None  # the fewest steps that can be asked for are enough
        found = owner_of(optimizer, self.living)
        job, facts = self.examination.whole(found, optimizer, self.window, closure=main.closure)
        self.facts = replace(facts, observed=observation)
        self.job = job if self.settings.budget_s is not None else None
        if self.long is not None:
            self.long.know(found, optimizer)
        self.forget()
        self.tell(complete=True)
        step_ms = statistics.median(observation.steps_ms)
        self.recording = StepProfiler(on_gpu=observation.clock == "cuda", step_ms=step_ms)
        self.recording.begin()
        if self.recording.problem is not None:
            self.finish(self.recording)

    def finish(self, recording: StepProfiler) -> None:
        """Add the profiled step, and stop watching."""
        assert self.facts is not None
        self.recording, self.done = None, True
        self.end_losses()
        observed, gaps = self.facts.observed, dict(self.facts.gaps) if recorded(self.facts, "gaps") else {}
        try:
            observed = recording.added_to(observed) if recording.problem is None else observed
        except Exception as error:
            _log.debug("the profile tells nothing", exc_info=True)
            recording.problem = sentence(error)
        if recording.problem is not None:
            gaps["observed.breakdown"] = gaps["observed.fp8_gemms"] = recording.problem
            self.channel.send(Message(note=f"no step was profiled: {recording.problem}"))
        self.facts = replace(self.facts, observed=observed, gaps=gaps)
        self.tell()
        if not self.settings.stop:
            self.channel.send(Message(watched=self.steps))

    def stop(self) -> None:
        """Time copies, if asked, before the script is stopped."""
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

    def paused(self) -> None:
        """Leave out what ran between two steps, such as an evaluation."""
        if self.window is not None:
            self.guarded(self.window.begin_step_again)

    def names(self) -> tuple[str, ...]:
        """Return the optimizers' classes, the largest first."""
        ordered = sorted(self.steppers.values(), key=lambda each: -each.elements)
        return tuple(dict.fromkeys(each.name for each in ordered))

    def forget(self) -> None:
        """Release the script's objects."""
        self.window = None
        self.watch.rest()
        self.living.forget()
        self.collect()

    @staticmethod
    def collect() -> None:
        """Collect garbage, unless the script has disabled the collector."""
        if gc.isenabled():
            gc.collect()

    def end_losses(self) -> None:
        """Stop hearing of losses, which a long watch needs to the end."""
        if self.long is None:
            self.losses.end()

    def give_up(self, why: str) -> None:
        """Stop watching, and report why."""
        self.done = True
        if self.window is not None:
            self.window.end()
        self.end_losses()
        if self.recording is not None:
            self.recording.end(why)
        self.forget()
        self.channel.send(Message(note=why))

    def failed(self) -> None:
        """Examine a script that failed before its first step."""
        if self.facts is None and not self.done:
            self.facts = self.examination.without_a_step(only_trainer(self.living))
            self.tell()

    def closed(self) -> int:
        """Report an unfinished window at the end. Return the main optimizer's steps."""
        if self.long is not None:
            self.guarded(self.long.ended)
        if self.recording is not None:
            self.recording.end(CUT_SHORT)
            self.finish(self.recording)
        if self.window is not None:
            self.window.end()
        self.losses.end()
        told = self.facts
        if told is None:
            return self.steps
        if not self.done and self.window is not None:
            observation = self.window.observation(self.names(), self.share)
            if observation is not None:
                self.facts = replace(told, observed=observation)
        if self.facts is not told or (self._not_finite() is not None and not recorded(told, "not_finite")):
            self.tell()
        return self.steps

    def _not_finite(self) -> NotFinite | None:
        """Return the first step that was not finite so far, None if none was seen. Waits for the GPU."""
        if self.long is not None and (bad := self.long.found) is not None:
            what: Literal["loss", "gradients"] = "loss" if bad.what == "loss" else "gradients"
            where = bad.sentence.removeprefix(f"step {bad.step:,}: the {bad.what} is not finite.").strip()
            return NotFinite(step=bad.step, what=what, where=where)
        step = self.losses.first_bad()
        return None if step is None else NotFinite(step=step, what="loss", where="")

    def tell(self, *, complete: bool = False) -> None:
        """Send all facts so far, with the first step that was not finite. A window stays ``complete``."""
        assert self.facts is not None
        self.complete = self.complete or complete
        if (found := self._not_finite()) is not None:
            self.facts = replace(self.facts, not_finite=found)
        self.channel.send(Message(facts=self.facts.to_dict(), complete=self.complete))
