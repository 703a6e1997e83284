"""Time a few of the script's own steps, and capture one batch.

The clock notes moments of the host and, on CUDA, of the GPU without waiting for it: an event is reached when
all work launched before it is done. Events are read after the window, so the job runs undisturbed.
"""

from __future__ import annotations

import inspect
import math
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median_low
from threading import get_ident
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.facts import NOT_RECORDED, Observation
from fp8doctor.loading.synthetic_batch import core
from fp8doctor.running.calls import Calls
from fp8doctor.running.losses import Loss, Losses, in_graphs, total
from fp8doctor.running.patches import Patch, unnoticed
from fp8doctor.running.stepped_model import Ownership, outside_compiled
from fp8doctor.stacks.looking import tensors_of
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import counters, frames_compiled, in_backward, loader_iterator
from fp8doctor.trial.copies.step import carried_loss
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.seen_calls import CallsSeen, Seen
from fp8doctor.trial.state.settings import open_autocast
from fp8doctor.wording import sentence

FEWEST_STEPS = 3
"""Steps that an incomplete window needs for a median."""


@dataclass
class _TimedStep:
    began: Moment
    ended: Moment | None = None
    first_call: Moment | None = None
    calls: int = 0
    backwards: int = 0
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)
    """Begin and end of each wait for a batch."""
    losses: list[Loss] = field(default_factory=list)


class StepWindow:
    """Times the steps between `begin` and `end`; leaves the script alone otherwise."""

    def __init__(
        self,
        steps: int,
        owner: Ownership | None,
        losses: Losses,
        *,
        keep: bool = False,
        function: bool = False,
    ) -> None:
        """Watch calls of the owner's modules, of which none is kept alive.

        The batch of one call is noted, and what the modules of the model run in; ``keep`` copies its data for
        a trial. If a compiled ``function`` may call the model, a mark on it would compile the function again,
        and no call is watched. ``losses`` are watched already.
        """
        self.steps = steps
        self.captured: Capture | None = None
        self._keep, self._losses = keep, losses
        self._model = weakref.ref(owner.model) if owner is not None else lambda: None
        self._seen = CallsSeen()
        self._compiled: tuple[int, ...] = ()
        modules = owner.callable if owner is not None else ()
        parameter = next((each for module in modules for _, each in tensors_of(module, "_parameters")), None)
        self._clock = Clock(parameter.device if parameter is not None else None)
        self._calls = Calls(() if function else modules, self._called)
        self._waits = Patch(loader_iterator(), "__next__", self._waits_for, self._waited)  # of all iterators
        self._autocasts = Patch(torch.autocast, "__enter__", self._opens)  # Dynamo never traces into it
        self._thread, self._waiting_now = get_ident(), 0
        self._done: list[_TimedStep] = []
        self._frames = frames_compiled()
        self.marked = not function and bool(modules)
        """Calls of a model could be seen."""
        self.seen = False
        """A call was seen."""
        self.in_a_function = False
        """Such a function computes the gradients of most parameters."""
        self.opened = False
        """The script opened an autocast while gradients were computed."""
        self.autocast: torch.dtype | None = None
        """Dtype of the autocast around a step's first call."""

    def begin(self) -> None:
        for each in (self._calls, self._waits, self._autocasts):
            each.begin()
        self._losses.look = None if self.marked else self._looks_at
        self._step = _TimedStep(self._clock.now())

    def _looks_at(self, loss: torch.Tensor) -> None:
        self._losses.look, model = None, self._model()
        own = [each for _, each in tensors_of(model, "_parameters")] if model is not None else []
        sizes = {id(each): each.numel() for each in own if each.requires_grad}
        self.in_a_function = sum(sizes.get(each, 0) for each in in_graphs(loss)) > sum(sizes.values()) / 2

    def stepped(self) -> bool:
        """Note the end of a step. Return whether it was the window's last."""
        step = self._step
        step.ended, step.backwards, step.losses = self._clock.now(), self._losses.passes, self._losses.step
        self._done.append(step)
        self._step = _TimedStep(step.ended)
        return len(self._done) >= self.steps

    def begin_step_again(self) -> None:
        """Drop what ran since the last step, if the model was not called."""
        if not self._step.calls:
            self._step = _TimedStep(self._clock.now())

    def end(self) -> None:
        for each in (self._calls, self._waits, self._autocasts):
            each.end()
        self._losses.look = None

    def observation(self) -> Observation | None:
        """Return the window's times; None if it is too short. Waits for the GPU."""
        if len(self._done) < FEWEST_STEPS:
            return None
        clock, steps = self._clock, self._done
        spans = [(each.began, each.ended) for each in steps if each.ended is not None]
        clock.settle(spans[-1][1])
        before = tuple(clock.ms(each.began, each.first_call) for each in steps if each.first_call is not None)
        waits_ms = tuple(sum(clock.ms(*wait) for wait in each.waits) for each in steps)
        losses = [total(each.losses) for each in steps]
        return Observation(
            steps_ms=tuple(clock.ms(*each) for each in spans),
            clock="cuda" if clock.on_gpu else "host",
            behind_ms=tuple(clock.behind_ms(end) for _, end in spans) if clock.on_gpu else None,
            data_ms=waits_ms if any(each.waits for each in steps) else None,
            before_forward_ms=before if len(before) == len(steps) else None,
            calls=_if_alike({each.calls for each in steps}),
            backwards=_if_alike({each.backwards for each in steps}),
            losses=None
            if None in losses
            else tuple(each if each is not None and math.isfinite(each) else None for each in losses),
            compiled=NOT_RECORDED if counters("frames") is None else frames_compiled() - self._frames,
            peak_gib=clock.peak_gib(),
        )

    @property
    def usual_calls(self) -> int:
        """Training calls of the step in the middle, at least 1."""
        return max(1, median_low(each.calls for each in self._done)) if self._done else 1

    def seen_calls(self, model: nn.Module, wanted: Iterable[str]) -> Seen:
        """Tell what the wanted layers ran in, and their rows; none if compiled code ran one of them."""
        layers, _ = rows.found(model, wanted, {})
        seen = self._seen.seen(layers, model, self._compiled)
        counted = {} if seen.compiled else self._seen.rows(layers)
        return replace(seen, autocast=self.opened, rows=counted)

    def _opens(self, context: Any) -> None:
        if get_ident() == self._thread and torch.is_grad_enabled() and context._enabled:
            self.opened = True

    def _waits_for(self, iterator: Any) -> Moment | None:
        """Return when this thread begins to wait for a batch."""
        if get_ident() != self._thread:
            return None
        began = self._clock.now()
        self._waiting_now += 1
        return began

    def _waited(self, began: Moment) -> None:
        self._waiting_now -= 1
        if not self._waiting_now:  # a DataLoader may read from another
            self._step.waits.append((began, self._clock.now()))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if in_backward() is not False or not torch.is_grad_enabled():  # recomputed by checkpointing
            return None
        step, self.seen = self._step, True
        step.calls += 1
        if step.first_call is None:
            step.first_call = self._clock.now()
            device = next((each.device.type for _, each in tensors_of(module, "_parameters")), "cpu")
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)
        if self.captured is None and len(self._done) == self.steps - 1:
            self.captured = Capture(module, args, kwargs, keep=self._keep)
            if (model := self._model()) is not None:
                outside, compiled = outside_compiled(model)
                self._compiled = tuple(map(id, compiled))
                self._calls.tell_within(outside, self._seen)
            return self.captured.returned
        self._seen.tell(module, kwargs)
        return None


def _if_alike(counts: set[int]) -> int | None:
    """Return the count of every step; None if it is 0 or steps differ."""
    return counts.pop() if len(counts) == 1 and counts != {0} else None


@dataclass(frozen=True)
class Moment:
    host_s: float
    event: Any
    """The GPU reaches it after all work launched before; None without a GPU."""


class Clock:
    """Notes moments; read the GPU's after `settle`. A step captured as a CUDA graph is timed by the host."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._last: tuple[Any, float] | None = None

    @property
    def on_gpu(self) -> bool:
        return self._device is not None

    def now(self) -> Moment:
        if self._device is not None and torch.cuda.is_current_stream_capturing():
            self._device = None
        event = None
        if self._device is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return Moment(time.perf_counter(), event)

    def peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated(self._device) / 2**30 if self.on_gpu else None

    def settle(self, last: Moment) -> None:
        """Wait until the GPU reaches the last moment, and align the two clocks there."""
        if self.on_gpu:
            last.event.synchronize()
            self._last = last.event, time.perf_counter()

    def ms(self, first: Moment, last: Moment) -> float:
        """Return the GPU's time between two moments, or the host's without a GPU."""
        if not self.on_gpu:
            return (last.host_s - first.host_s) * 1e3
        return max(0.0, float(first.event.elapsed_time(last.event)))

    def behind_ms(self, moment: Moment) -> float:
        """Return how far the GPU was behind the host at a moment; 0 without a GPU."""
        if self._last is None:
            return 0.0
        event, reached_s = self._last
        return max(0.0, (reached_s - moment.host_s) * 1e3 - float(moment.event.elapsed_time(event)))


LARGEST = 2**30
"""Most bytes to keep of a batch, and of the output's gradients. A choice: they must fit next to a training
that fills its GPU. The BF16 logits of 16 x 1024 tokens with 32,000 words are this large."""


class Capture:
    """Input and output gradients of one call of the model."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = True
    ) -> None:
        """Keep copies of the data with ``keep``, because the script may overwrite its own; else shapes."""
        self.module, self._keep = module, keep
        self.batch: Any = None
        self.problem: str | None = None
        """Why there is no batch."""
        self.own_loss = False
        """The output carries the loss."""
        self.around = open_autocast()
        self._gradients: dict[int, torch.Tensor] = {}
        if sum(each.numel() * each.element_size() for each in tensors((args, kwargs))) > LARGEST:
            self.problem = f"the batch is larger than {LARGEST >> 30} GiB"
            return
        try:
            batch = _named(module, args, kwargs) if kwargs and args else kwargs or args
            self.batch = with_tensors(batch, self._kept)
        except Exception as error:  # the memory may be full, and tensors may be of any class
            self.problem = f"the batch could not be kept: {sentence(error)}"

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.detach()
        return own.clone() if self._keep else torch.empty_like(own, device="meta")

    def returned(self, output: Any) -> None:
        """Take the output's gradients in the backward pass."""
        self.own_loss = isinstance(carried_loss(output), torch.Tensor)
        if self.own_loss:
            return
        for position, each in enumerate(tensors(output)):
            if each.requires_grad and each.numel() * each.element_size() <= LARGEST:
                each.register_hook(partial(self._take, position))  # type: ignore[no-untyped-call]

    def _take(self, position: int, gradient: torch.Tensor) -> None:
        with unnoticed():
            self._gradients[position] = self._kept(gradient)

    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """Return a loss that reproduces the captured gradients; None if there are none."""
        gradients = self._gradients
        if self.own_loss or not gradients:
            return None

        def loss(output: Any, batch: Any) -> torch.Tensor:
            parts = [
                (each * gradients[position].to(each.device, each.dtype)).sum()
                for position, each in enumerate(tensors(output))
                if position in gradients
            ]
            return torch.stack([each.float() for each in parts]).sum()

        return loss


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name all arguments of a call. Raises TypeError or ValueError if one has no name."""
    signature = inspect.signature(core(module).forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for each in signature.parameters.values():
        if each.name in named and each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            raise ValueError("the model takes an argument that has no name")
        if each.kind is each.VAR_KEYWORD:
            named |= named.pop(each.name, {})
    return named
