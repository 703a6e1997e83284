"""The window: a few of the script's own steps, timed, with one batch of theirs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8doctor.facts import Observation
from fp8doctor.running.calls import Calls
from fp8doctor.running.capture import Capture
from fp8doctor.running.clock import Clock, Moment
from fp8doctor.running.loader_waits import LoaderWaits

FEWEST_STEPS = 3
"""Steps from which on a window that was cut short still tells a median."""


@dataclass
class _Step:
    """What is noted while a step runs."""

    began: Moment
    ended: Moment | None = None
    first_call: Moment | None = None
    calls: int = 0
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)
    """For batches."""


class Window:
    """Times steps from `begin` to `end`. Outside of that nothing of it is in the script's way."""

    def __init__(
        self, steps: int, warmup: int, modules: tuple[nn.Module, ...], *, capture: bool, keep: bool = False
    ) -> None:
        """``capture`` looks at the batch of one call, ``keep`` for a trial."""
        self.steps, self.warmup = steps, warmup
        self.captured: Capture | None = None
        self._captures, self._keep = capture, keep
        parameter = next((each for module in modules for each in module.parameters()), None)
        self._clock = Clock(parameter.device if parameter is not None else None)
        self._calls, self._waits = (
            Calls(modules, self._called),
            LoaderWaits(self._clock.now, self._waited),
        )
        self._done: list[_Step] = []
        self._frames = frames_compiled()
        self.marked = bool(modules)
        """Whether calls of a model could be seen."""

    def begin(self) -> None:
        """Watch from here, the end of a step, on."""
        self._calls.begin()
        self._waits.begin()
        self._step = _Step(self._clock.now())

    def stepped(self) -> bool:
        """Note that a step has ended; whether it was the last of the window."""
        self._step.ended = self._clock.now()
        self._done.append(self._step)
        self._step = _Step(self._step.ended)
        return len(self._done) >= self.steps

    def begin_step_again(self) -> None:
        """Leave out what ran since the last step's end, such as an evaluation; nothing of a step that called
        the model already."""
        if not self._step.calls:
            self._step = _Step(self._clock.now())

    def end(self) -> None:
        """Take everything out of the script's way."""
        self._calls.end()
        self._waits.end()

    def observation(self, optimizers: tuple[str, ...], share: float) -> Observation | None:
        """What the window tells; None where it is too short. Waits for the GPU, the first time since it
        began."""
        if len(self._done) < FEWEST_STEPS:
            return None
        clock, steps = self._clock, self._done
        spans = [(each.began, each.ended) for each in steps if each.ended is not None]
        launches = [
            (each.first_call, each.ended)
            for each in steps
            if each.first_call is not None and each.ended is not None
        ]
        clock.settle(spans[-1][1])
        called = len(launches) == len(steps)
        return Observation(
            steps_ms=tuple(clock.ms(*each) for each in spans),
            warmup=self.warmup,
            clock="cuda" if clock.on_gpu else "host",
            host_ms=tuple(clock.host_ms(*each) for each in spans) if clock.on_gpu else None,
            launch_ms=tuple(clock.host_ms(*each) for each in launches) if called and clock.on_gpu else None,
            behind_ms=tuple(clock.behind_ms(end) for _, end in spans) if clock.on_gpu else None,
            data_ms=tuple(sum(clock.ms(*wait) for wait in each.waits) for each in steps)
            if any(each.waits for each in steps)
            else None,
            before_forward_ms=tuple(
                clock.ms(began, first) for (began, _), (first, _) in zip(spans, launches, strict=True)
            )
            if called
            else None,
            calls=self.calls,
            compiled=frames_compiled() - self._frames,
            optimizers=optimizers,
            share_pct=100 * share,
            peak_gib=clock.peak_gib(),
        )

    @property
    def calls(self) -> int | None:
        """Training calls of the model in a step; None where they differ or none was seen."""
        counts = {each.calls for each in self._done}
        return counts.pop() if len(counts) == 1 and counts != {0} else None

    def _waited(self, begin: Moment, end: Moment) -> None:
        self._step.waits.append((begin, end))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recomputed = torch._C._current_graph_task_id() >= 0  # inside a backward pass, by checkpointing
        if recomputed or not torch.is_grad_enabled():
            return None
        step = self._step
        step.calls += 1
        if step.first_call is None:
            step.first_call = self._clock.now()
        if self._captures and self.captured is None and len(self._done) == self.steps - 1:
            self.captured = Capture(module, args, kwargs, keep=self._keep)
            return self.captured.returned
        return None


def frames_compiled() -> int:
    """Frames that Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["frames"]["ok"] if utils is not None else 0
