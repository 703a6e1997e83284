"""Watch every step to the script's end, with ``--stop-on-nan`` or ``--health``.

Finds the first step whose loss or gradient is not finite, and the layer where it started. The loss is read
before the optimizer steps, when its forward is long done. The weights are still those that gave it, and the
first that is not finite is named. Gradients that are not finite show in the next step's loss, so nothing
waits for them. A backward pass spoils all layers before the one where it started, so the last spoiled layer
is named.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8doctor.health.record import FirstBad
from fp8doctor.running.health_monitor import monitor
from fp8doctor.running.losses import Losses
from fp8doctor.running.script_messages import Message, Note, Progress, WatchOptions
from fp8doctor.running.stepped_model import Ownership, held
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import recognise
from fp8doctor.stacks.looking import modules_of
from fp8doctor.stacks.tensors import local, stored
from fp8doctor.stacks.torch_private import frames_compiled, without_modes
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.wording import plural, sentence

_log = logging.getLogger("fp8doctor")

KEPT = 2
"""Steps whose gradients are kept: weights that are not finite spoil the next step's loss."""

STOPPED = 1
"""Exit code of a script that ``--stop-on-nan`` stops."""

Owner = tuple[str, nn.Module, nn.Parameter, str]
"""A module's name, the module, one of its parameters, and the parameter's name."""


class LongWatch:
    """Watches every step of the main optimizer; no hook is left on modules between samples."""

    def __init__(self, settings: WatchOptions, send: Callable[[Message], None], losses: Losses) -> None:
        """Read ``losses``, which are watched already."""
        self._stops, self._send, self.losses = settings.stop_on_nan, send, losses
        losses.wants_largest = True
        self.found: FirstBad | None = None
        """The first step that is not finite so far."""
        self._recent: deque[tuple[int, list[int], list[torch.Tensor]]] = deque(maxlen=KEPT)
        """Largest magnitudes of gradients, on the device."""
        self._health = None
        if settings.health is not None:
            path = Path(settings.health)
            self._health = monitor(path, settings.every, settings.script, self._note, self.losses)
        self._first: weakref.ref[Any] | None = None
        """First parameter of the main optimizer."""
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._find: Callable[[], tuple[nn.Module, bool] | None] = lambda: None
        self._steps, self._over = 0, False
        self._frames = frames_compiled()

    def install(self) -> None:
        """Watch the beginning of optimizer steps."""
        self._removable = register_optimizer_step_pre_hook(self._before)

    def know(self, found: Ownership | None, optimizer: Optimizer) -> None:
        """Name the layers of this model. A later call replaces it."""
        parameters = held(optimizer)
        if found is None or not parameters:
            return
        self._first, self._model = weakref.ref(parameters[0]), weakref.ref(found.model)
        function = frames_compiled() > self._frames and not found.compiled
        self._find = lambda: None if (alive := self._model()) is None else (alive, function)
        self.losses.watch(parameters)

    def stepped(self, optimizer: Optimizer, *, sample: bool) -> None:
        """Note the end of a step; with ``sample``, health may be sampled from now on."""
        if not self._over and self._is_main(optimizer):
            with self._guarded():
                self._steps += 1
                if self.found is None and self.losses.largest is not None:
                    self._recent.append((self._step, *self.losses.largest))
                if self._health is not None:
                    self._health.stepped(optimizer, self._find if sample else None)
                self.losses.next_step()
            self._stop()

    def ended(self) -> None:
        """End the watching with the script."""
        self._removable.remove()
        self._look_at_gradients()
        self.losses.end()
        if self._health is not None:
            self._health.stop()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at the loss. Waits for the forward, which the GPU has done long before the host is here."""
        if self._over or torch.compiler.is_compiling() or not self._is_main(optimizer):
            return
        with self._guarded():
            if self.found is None and (loss := self.losses.loss()) is not None and not math.isfinite(loss):
                self._look_at_gradients()
                if self.found is None:
                    self._look_at_weights()
        self._stop()

    def _look_at_weights(self) -> None:
        model, step = self._model(), self._step + 1
        with without_modes(), torch.no_grad():
            for owner in _owners(model) if model is not None else ():
                weight = stored(local(owner[2]))  # of this process alone
                if weight.is_floating_point() and not bool(weight.isfinite().all()):
                    self._report(step, "loss", owner, owner[3], "It was not finite before this step.")
                    return
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
            owners = [] if model is None else [each for each in _owners(model) if id(each[2]) in bad]
            if not owners:
                self._report(step, "gradient", None, "", "")
                return
            last = next(each for each in owners if each[1] is owners[-1][1])
            note = f"{len(owners)} of {plural(len(places), 'gradient')} are not finite, up to this layer."
            self._report(step, "gradient", last, f"gradient of its {last[3]}", note)

    def _report(self, step: int, what: str, where: Owner | None, tensor: str, note: str) -> None:
        """Say at once where it started."""
        name, fp8, started = None, None, ""
        if where is not None:
            name = cleaned(where[0]) or "the model"
            fp8 = any(each.use == "training" for each in recognise(where[1], {}))
            kind = f"{type(where[1]).__name__}, {'FP8' if fp8 else 'not FP8'}"
            started = f" It started in {name} ({kind}): {tensor}."
        told = f"step {step:,}: the {what} is not finite.{started} {note}".strip()
        self.found = FirstBad(step, what, name, tensor or None, fp8, told)
        self._recent.clear()
        self._send(Progress(told))
        self._note(told)
        if self._health is not None:
            self._health.file.append(self.found)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the watching at a failure of ours, which never reaches the script."""
        try:
            with signals_deferred():
                yield
        except Exception as error:
            _log.debug("the long watch failed", exc_info=True)
            self._over = True
            self.losses.end()
            self._note(
                f"the script was not watched for values that are not finite any further: {sentence(error)}"
            )

    @property
    def _step(self) -> int:
        return self._health.step if self._health is not None else self._steps

    def _is_main(self, optimizer: Optimizer) -> bool:
        if self._first is None:
            return True
        groups = optimizer.param_groups
        return bool(groups) and next(iter(groups[0]["params"]), None) is self._first()

    def _stop(self) -> None:
        if self._stops and self.found is not None:
            raise SystemExit(STOPPED)

    def _note(self, text: str) -> None:
        self._send(Note(text))


def _owners(model: nn.Module) -> list[Owner]:
    """List module, parameter and its name in the module, in the model's order; shared ones once."""
    seen: set[int] = set()
    found = []
    for name, module in modules_of(model):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((name, module, parameter, key))
    return found
