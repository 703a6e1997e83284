"""The window: a few of the script's own steps, timed, with one batch of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn

from fp8doctor.facts import Observation
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.running.calls import Calls
from fp8doctor.running.capture import Capture, autocast_around, carried_loss
from fp8doctor.running.clock import Clock, Moment
from fp8doctor.running.loader_waits import LoaderWaits
from fp8doctor.stacks.torch_private import counters, frames_compiled, in_backward, without_modes

FEWEST_STEPS = 3
"""Steps from which on a window that was cut short still tells a median."""

OF_ALL = "num_items_in_batch"
"""Argument of transformers' models (4.46 on) by which they divide the loss: the tokens of the whole step."""


@dataclass
class _Step:
    """What is noted while a step runs."""

    began: Moment
    ended: Moment | None = None
    first_call: Moment | None = None
    calls: int = 0
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)
    """For batches."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Copies without a graph, one a call; the script may write into its own."""
    shares: bool = False
    """Whether each is a share of the step's loss, as transformers' models give it that are told the tokens of
    all micro-batches."""

    def returned(self, output: Any) -> None:
        """Note the loss that a call's output carries. A distributed one would have to be gathered to be
        read."""
        loss = carried_loss(output)
        if loss is not None and type(loss) is torch.Tensor and loss.numel() == 1 and not _recorded(loss):
            self.losses.append(loss.detach().clone())

    def loss(self) -> float | None:
        """The loss of the step, None where it is not finite. Waits for the GPU."""
        losses = [each.item() for each in self.losses]
        loss = sum(losses) if self.shares else fmean(losses)
        return loss if math.isfinite(loss) else None


class Window:
    """Times steps from `begin` to `end`. Outside of that nothing of it is in the script's way."""

    def __init__(
        self,
        steps: int,
        warmup: int,
        modules: tuple[nn.Module, ...],
        *,
        inside: tuple[nn.Module, ...] = (),
        capture: bool,
        keep: bool = False,
        mark: bool = True,
    ) -> None:
        """``inside`` are modules within compiled regions that nothing has run yet. ``capture`` looks at the
        batch of one call, ``keep`` for a trial. Without ``mark`` no call of the modules is watched: they only
        tell the device."""
        self.steps, self.warmup = steps, warmup
        self.captured: Capture | None = None
        self._captures, self._keep = capture, keep
        parameter = next((each for module in modules for each in module.parameters()), None)
        self._clock = Clock(parameter.device if parameter is not None else None)
        self._calls, self._waits = (
            Calls(modules if mark else (), self._called, inside if mark else ()),
            LoaderWaits(self._clock.now, self._waited),
        )
        self._done: list[_Step] = []
        self._frames = frames_compiled()
        self.marked = mark and bool(modules)
        """Whether calls of a model could be seen."""
        self.seen = False
        """Whether one was."""
        self.autocast: torch.dtype | None = None
        """Dtype of the autocast that the first of a step stood in."""

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
            losses=self._losses(),
            compiled=NOT_RECORDED if counters("frames") is None else frames_compiled() - self._frames,
            optimizers=optimizers,
            share_pct=100 * share,
            peak_gib=clock.peak_gib(),
        )

    @property
    def calls(self) -> int | None:
        """Training calls of the model in a step; None where they differ or none was seen."""
        counts = {each.calls for each in self._done}
        return counts.pop() if len(counts) == 1 and counts != {0} else None

    def _losses(self) -> tuple[float | None, ...] | None:
        if not all(each.losses and len(each.losses) == each.calls for each in self._done):
            return None
        with without_modes():
            return tuple(each.loss() for each in self._done)

    def _waited(self, begin: Moment, end: Moment) -> None:
        self._step.waits.append((begin, end))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_backward() is not False or not torch.is_grad_enabled():  # recomputed by checkpointing
            return None
        step, self.seen = self._step, True
        step.calls += 1
        step.shares = kwargs.get(OF_ALL) is not None
        if step.first_call is None:
            step.first_call, self.autocast = self._clock.now(), autocast_around(module)
        if self._captures and self.captured is None and len(self._done) == self.steps - 1:
            self.captured = Capture(module, args, kwargs, keep=self._keep)
            return partial(_all, (step.returned, self.captured.returned))
        return step.returned


def _all(told: tuple[Callable[[Any], None], ...], output: Any) -> None:
    for each in told:
        each(output)


def _recorded(tensor: torch.Tensor) -> bool:
    """Whether the script records a CUDA graph, of which a copy would become a part."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
