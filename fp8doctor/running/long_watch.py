"""Watch every step to the script's end, with ``--stop-on-nan`` or ``--health``.

Finds the first step whose loss or gradient is not finite, and the layer where it started. The loss is read
before the optimizer steps, when its forward is long done. The weights are still those that gave it, and the
first that is not finite is named. Gradients that are not finite show in the next step's loss, so nothing
waits for them. A backward pass spoils all layers before the one where it started, so the last spoiled layer
is named.

FP8's health is sampled every so many steps and appended to a file. If the user names no distance, the next
sample comes when the last one's cost is at most `SHARE` of the time between the two. Between samples nothing
is left on the script's modules.
"""

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8doctor.errors import UserError
from fp8doctor.facts.scrub import scrub
from fp8doctor.health.record import FirstBad, Header, HealthFile, Sample, last_step, significant
from fp8doctor.running.layer_sampler import LayerSampler
from fp8doctor.running.losses import Losses, Owner, owners, spoiled, total
from fp8doctor.running.patches import unnoticed
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.running.stepped_model import Ownership
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import is_fp8
from fp8doctor.stacks.looking import parameters_in, tensors_of
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.wording import plural, sentence

KEPT = 2
"""Steps whose gradients are kept: weights that are not finite spoil the next step's loss."""

STOPPED = 1
"""Exit code of a script that ``--stop-on-nan`` stops."""

EVERY = 100
"""Least steps between two samples if the user names none. A choice: faults are to be named within 100."""

SHARE = 0.008
"""Largest share of the time that samples may take if the user names no distance: below the promised 1%."""


class LongWatch:
    """Watches every step of the main optimizer."""

    def __init__(self, settings: WatchOptions, send: Callable[[Message], None], losses: Losses) -> None:
        """Read ``losses``, which are watched already."""
        self._settings, self._send, self.losses = settings, send, losses
        losses.wants_largest = True
        self.found: FirstBad | None = None
        """The first step that is not finite so far."""
        self._recent: deque[tuple[int, list[int], list[torch.Tensor]]] = deque(maxlen=KEPT)
        """Largest magnitudes of gradients, on the device."""
        self._first: Callable[[], Any] | None = None
        """First parameter of the main optimizer."""
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._frames, self._function = frames_compiled(), False
        self._process, self._over = os.getpid(), False
        self._file: HealthFile | None = None
        if settings.health is not None:
            try:
                self._file = HealthFile(Path(settings.health))
            except UserError as error:
                send(Message(note=f"FP8's health is not sampled: {error}"))
        self._sampler: LayerSampler | None = None
        self._sampling = False
        self._steps = self._due = self._last = 0
        self._base = 0
        """Steps before the watching, of a checkpoint or the file."""
        self._ended_s = self._began_s = self._step_s = 0.0
        self._hook = register_optimizer_step_pre_hook(self._before)

    def know(self, found: Ownership | None, optimizer: Optimizer) -> None:
        """Name and sample the layers of this model. A later call replaces it."""
        parameters = [*parameters_in(optimizer)]
        if found is not None and parameters:
            if self._model() is not found.model:
                self._sampler = None
            self._first, self._model = weakref.ref(parameters[0]), weakref.ref(found.model)
            self._function = frames_compiled() > self._frames and not found.compiled
            self.losses.watch(parameters)

    def stepped(self, optimizer: Optimizer, *, sample: bool) -> None:
        """Note the end of a step; with ``sample``, health may be sampled from now on."""
        if self._leaves_out(optimizer):
            return
        with signals_deferred(), unnoticed(self._failed):
            self._steps += 1
            if self.found is None and self.losses.largest is not None:
                self._recent.append((self._base + self._steps, *self.losses.largest))
            if self._sampling:
                self._end_sample()
            self.losses.next_step()
            if self._file is not None and sample and self._steps >= self._due:
                self._begin_sample(self._file, optimizer)
        self._stop()

    def ended(self) -> None:
        self._hook.remove()
        self._look_at_gradients()
        self._release()

    def _release(self) -> None:
        self._over = True
        self.losses.end()
        if self._sampler is not None and self._sampling:
            self._sampler.release()

    # Values that are not finite

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at the loss. Waits for the forward, which the GPU has done long before the host is here."""
        if torch.compiler.is_compiling() or self._leaves_out(optimizer):
            return
        with signals_deferred(), unnoticed(self._failed):
            if self.found is None and not math.isfinite(total(self.losses.step) or 0.0):
                self._look_at_gradients()
                if self.found is None:
                    self._look_at_weights()
        self._stop()

    def _look_at_weights(self) -> None:
        model, step = self._model(), self._base + self._steps + 1
        owner = spoiled(model) if model is not None else None
        if owner is not None:
            self._report(step, "loss", owner, owner[3], "It was not finite before this step.")
        else:
            self._report(step, "loss", None, "", "All weights are finite." if model is not None else "")

    def _look_at_gradients(self) -> None:
        while self.found is None and self._recent:
            step, places, largest = self._recent.popleft()
            numbers = zip(places, (float(each) for each in largest), strict=True)
            spoiled = [place for place, each in numbers if not math.isfinite(each)]
            if not spoiled:
                continue
            parameters, model = self.losses.parameters, self._model()
            bad = {id(parameters[place]) for place in spoiled}
            found = [] if model is None else [each for each in owners(model) if id(each[2]) in bad]
            if not found:
                self._report(step, "gradient", None, "", "")
                return
            last = next(each for each in found if each[1] is found[-1][1])
            note = f"{len(found)} of {plural(len(places), 'gradient')} are not finite, up to this layer."
            self._report(step, "gradient", last, f"gradient of its {last[3]}", note)

    def _report(self, step: int, what: str, where: Owner | None, tensor: str, note: str) -> None:
        name, fp8, started = None, None, ""
        if where is not None:
            name = cleaned(where[0]) or "the model"
            fp8 = is_fp8(where[1])
            kind = f"{type(where[1]).__name__}, {'FP8' if fp8 else 'not FP8'}"
            started = f" It started in {name} ({kind}): {tensor}."
        told = f"step {step:,}: the {what} is not finite.{started} {note}".strip()
        self.found = FirstBad(step, what, name, tensor or None, fp8, told)
        self._recent.clear()
        self._send(Message(progress=told, note=told))
        if self._file is not None:
            self._file.append(self.found)

    # FP8's health

    def _begin_sample(self, file: HealthFile, optimizer: Optimizer) -> None:
        if (model := self._model()) is None:
            self._file = None
            self._send(Message(note="FP8's health was not sampled: the model was not found"))
            return
        if self._sampler is None:
            self._sampler = LayerSampler(model, compiled_function=self._function)
            counted, path = _steps_of(optimizer), Path(self._settings.health or "")
            self._base = last_step(path) if counted is None else max(0, counted - self._steps)
            device = next((each.device for _, each in tensors_of(model, "_parameters")), torch.device("cpu"))
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            settings, step, layers = self._settings, self._base + self._steps, tuple(self._sampler.layers)
            torch_version = str(torch.__version__)
            file.append(
                Header(settings.script, settings.every, step, layers, torch=torch_version, device=name)
            )
        _wait()
        self._began_s = time.perf_counter()
        if self._last and self._steps > self._last:
            self._step_s = (self._began_s - self._ended_s) / (self._steps - self._last)
        self.losses.wants_norm = self._sampling = True
        self._sampler.begin()

    def _end_sample(self) -> None:
        assert self._sampler is not None
        assert self._file is not None
        layers, loss, norm = self._sampler.end(), total(self.losses.step), self.losses.norm
        self.losses.wants_norm = self._sampling = False
        _wait()
        self._ended_s, self._last = time.perf_counter(), self._steps
        known = self._step_s > 0
        cost_s = max(0.0, self._ended_s - self._began_s - self._step_s)
        sample = Sample(
            step=self._base + self._steps,
            loss=None if loss is None else significant(loss),
            gradient_norm=None if norm is None else significant(float(norm)),
            layers=layers,
            cost_ms=significant(cost_s * 1e3) if known else None,
            step_ms=significant(self._step_s * 1e3) if known else None,
            notes=tuple(map(scrub, self._sampler.notes)),
        )
        self._file.append(sample)
        enough = math.ceil(cost_s / (SHARE * self._step_s)) if known else 0
        self._due = self._steps + (self._settings.every or max(EVERY, enough)) - 1

    def _failed(self, error: Exception) -> None:
        self._release()
        told = "neither values that are not finite nor FP8's health were watched any further"
        self._send(Message(note=f"{told}: {sentence(error)}"))

    def _leaves_out(self, optimizer: Optimizer) -> bool:
        """Tell if a step is not watched: after the end, in a fork, and of other optimizers."""
        if self._over or os.getpid() != self._process:
            return True
        return self._first is not None and next(parameters_in(optimizer), None) is not self._first()

    def _stop(self) -> None:
        if self._settings.stop_on_nan and self.found is not None:
            raise SystemExit(STOPPED)


def _wait() -> None:
    """Let the GPU catch up, so that a sample's cost is its own."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _steps_of(optimizer: Optimizer) -> int | None:
    """Return the steps that an optimizer counts itself, which a checkpoint restores; None if it does not."""
    state = next(iter(optimizer.state.values()), None)
    count = state.get("step") if isinstance(state, dict) else None
    return int(count) if isinstance(count, int | torch.Tensor) else None
