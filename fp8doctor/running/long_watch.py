"""Watch every step to the script's end, with ``--stop-on-nan`` or ``--health``.

Finds the first step whose loss is not finite. The loss is read before the optimizer steps, when its forward
is long done. The weights are still those that gave it, and the first that is not finite is named. Gradients
that are not finite spoil the weights, and show in the next step's loss.

FP8's health is sampled every so many steps and appended to a file. If the user names no distance, the next
sample comes when the last one's cost is at most `SHARE` of the time between the two. Between samples nothing
is left on the script's modules.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.errors import UserError
from fp8doctor.facts import NotFinite
from fp8doctor.facts.scrub import scrub
from fp8doctor.health.record import FirstBad, Header, HealthFile, Sample, last_step, significant
from fp8doctor.running.layer_sampler import LayerSampler
from fp8doctor.running.losses import Losses, finite, spoiled_weight, total
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.running.stepped_model import held

STOPPED = 1
"""Exit code of a script that ``--stop-on-nan`` stops."""

EVERY = 100
"""Least steps between two samples if the user names none. A choice: faults are to be named within 100."""

SHARE = 0.008
"""Largest share of the time that samples may take if the user names no distance: below the promised 1%."""


class LongWatch:
    """Watches every step of the main optimizer. The observer calls it, and catches its failures."""

    def __init__(self, settings: WatchOptions, send: Callable[[Message], None], losses: Losses) -> None:
        """Read ``losses``, which are watched already."""
        self._settings, self._send, self.losses = settings, send, losses
        losses.at_once = True
        self.found: NotFinite | None = None
        """The first step that is not finite so far."""
        self.bad: FirstBad | None = None
        """The same, for the health's file."""
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._function = False
        self._file: HealthFile | None = None
        if settings.health is not None:
            try:
                self._file = HealthFile(Path(settings.health))
            except UserError as error:
                send(Message(note=f"FP8's health is not sampled: {error}"))
        self._sampler: LayerSampler | None = None
        self._sampling = False
        self._due = self._last = 0
        self._base = 0
        """Steps before the watching, of a checkpoint or the file."""
        self._ended_s = self._began_s = self._step_s = 0.0

    def know(self, model: nn.Module, optimizer: Optimizer, *, compiled_function: bool) -> None:
        """Name and sample the layers of this model. A later call replaces it."""
        if self._model() is not model:
            self._sampler = None
        self._model, self._function = weakref.ref(model), compiled_function
        self.losses.watch(held(optimizer))

    def before_step(self, step: int) -> None:
        """Look at the loss. Waits for the forward, which the GPU has done long before the host is here."""
        if self.found is None and not finite(self.losses.step):
            self._found(self._base + step)
        self._stop()

    def stepped(self, optimizer: Optimizer, step: int, *, sample: bool) -> None:
        """Note the end of a step; with ``sample``, health may be sampled from now on."""
        if self._sampling:
            self._end_sample(step)
        self.losses.next_step()
        if self._file is not None and sample and step >= self._due:
            self._begin_sample(self._file, optimizer, step)
        self._stop()

    def release(self) -> None:
        if self._sampler is not None and self._sampling:
            self._sampler.release()

    def _stop(self) -> None:
        if self._settings.stop_on_nan and self.found is not None:
            raise SystemExit(STOPPED)

    def _found(self, step: int) -> None:
        """Tell of the first step that is not finite, and of its first weight that is not."""
        model, weight = self._model(), None
        if model is not None:
            weight = spoiled_weight(model, frozen=True) or spoiled_weight(model, frozen=False)
        where = str(weight or ("All weights are finite." if model is not None else ""))
        told = f"step {step:,}: the loss is not finite. {where}".strip()
        self.found = NotFinite(step=step, what="loss", where=where)
        layer, tensor, fp8 = (weight.module, weight.name, weight.fp8) if weight else (None, None, None)
        self.bad = FirstBad(step, "loss", layer, tensor, fp8, told)
        self._send(Message(progress=told, note=told))
        if self._file is not None:
            self._file.append(self.bad)

    # FP8's health

    def _begin_sample(self, file: HealthFile, optimizer: Optimizer, steps: int) -> None:
        if (model := self._model()) is None:
            self._file = None
            self._send(Message(note="FP8's health was not sampled: the model was not found"))
            return
        if self._sampler is None:
            self._sampler = LayerSampler(model, compiled_function=self._function)
            counted, path = _steps_of(optimizer), Path(self._settings.health or "")
            self._base = last_step(path) if counted is None else max(0, counted - steps)
            device = next((each.device for each in model.parameters()), torch.device("cpu"))
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            settings, step, layers = self._settings, self._base + steps, tuple(self._sampler.layers)
            torch_version = str(torch.__version__)
            file.append(
                Header(settings.script, settings.every, step, layers, torch=torch_version, device=name)
            )
        _wait()
        self._began_s = time.perf_counter()
        if self._last and steps > self._last:
            self._step_s = (self._began_s - self._ended_s) / (steps - self._last)
        self.losses.wants_norm = self._sampling = True
        self._sampler.begin()

    def _end_sample(self, steps: int) -> None:
        assert self._sampler is not None
        assert self._file is not None
        layers, loss, norm = self._sampler.end(), total(self.losses.step), self.losses.norm
        self.losses.wants_norm = self._sampling = False
        _wait()
        self._ended_s, self._last = time.perf_counter(), steps
        known = self._step_s > 0
        cost_s = max(0.0, self._ended_s - self._began_s - self._step_s)
        sample = Sample(
            step=self._base + steps,
            loss=None if loss is None else significant(loss),
            gradient_norm=None if norm is None else significant(float(norm)),
            layers=layers,
            cost_ms=significant(cost_s * 1e3) if known else None,
            step_ms=significant(self._step_s * 1e3) if known else None,
            notes=tuple(map(scrub, self._sampler.notes)),
        )
        self._file.append(sample)
        enough = math.ceil(cost_s / (SHARE * self._step_s)) if known else 0
        self._due = steps + (self._settings.every or max(EVERY, enough)) - 1


def _wait() -> None:
    """Let the GPU catch up, so that a sample's cost is its own."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _steps_of(optimizer: Optimizer) -> int | None:
    """Return the steps that an optimizer counts itself, which a checkpoint restores; None if it does not."""
    state = next(iter(optimizer.state.values()), None)
    count = state.get("step") if isinstance(state, dict) else None
    return int(count) if isinstance(count, int | torch.Tensor) else None
