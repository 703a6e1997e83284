"""Sample FP8's health every so many steps of a training, and append it to a file.

Between samples nothing is left on the script's modules. If the user names no distance, the next sample comes
when the last one's cost is at most `SHARE` of the time between the two.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.errors import UserError
from fp8doctor.facts.scrub import scrub
from fp8doctor.health.record import HealthFile, Sample, header, last_step, significant
from fp8doctor.running.layer_sampler import LayerSampler
from fp8doctor.running.losses import Losses
from fp8doctor.running.stepped_model import held
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

EVERY = 100
"""Least steps between two samples if the user names none. A choice: faults are to be named within 100."""

SHARE = 0.008
"""Largest share of the time that samples may take if the user names no distance: below the promised 1%."""

Find = Callable[[], tuple[nn.Module, bool] | None]
"""Returns the model, and if a compiled function may call it."""


class HealthMonitor:
    """Takes samples of one training. Failures never reach it: they end the sampling, with a note."""

    def __init__(
        self,
        path: Path,
        every: int | None,
        script: str,
        note: Callable[[str], object],
        losses: Losses,
    ) -> None:
        """Write to ``path``. Raises `UserError` if it cannot write."""
        self.file = HealthFile(path)
        self._path, self._every, self._script, self._note = path, every, script, note
        self._losses = losses
        self._owner = os.getpid()
        self._model: weakref.ref[nn.Module] | None = None
        self._sampler: LayerSampler | None = None
        self._sampling = self._over = False
        self._steps = self._base = self._due = 0
        self._ended_s = self._began_s = self._cost_s = self._step_s = 0.0
        self._last = 0
        """Step of the last sample."""

    @property
    def step(self) -> int:
        """The last step, counted on from a checkpoint or from the file."""
        return self._base + self._steps

    def stepped(self, optimizer: Optimizer, find: Find | None) -> None:
        """Note the end of a step: end a sample, and begin one if it is due; without ``find`` only count."""
        if self._over or os.getpid() != self._owner:
            return
        self._steps += 1
        try:
            if self._sampling:
                self._end()
            if find is not None and self._steps >= self._due:
                self._begin(optimizer, find)
        except Exception as error:
            _log.debug("the health could not be sampled", exc_info=True)
            self.stop(f"FP8's health was not sampled any further: {sentence(error)}")

    def stop(self, why: str | None = None) -> None:
        """End the sampling."""
        if self._sampling and self._sampler is not None:
            self._sampler.release()
        self._sampling, self._over, self._sampler = False, True, None
        if why is not None:
            self._note(why)

    def _begin(self, optimizer: Optimizer, find: Find) -> None:
        if self._model is None or self._model() is None:
            if (found := find()) is None:
                self.stop("FP8's health was not sampled: the model was not found")
                return
            self._describe(optimizer, *found)
        assert self._sampler is not None
        _wait()
        self._began_s = time.perf_counter()
        if self._last and self._steps > self._last:
            self._step_s = (self._began_s - self._ended_s) / (self._steps - self._last)
        self._losses.watch(held(optimizer))
        self._losses.wants_norm = True
        self._losses.next_step()
        self._sampling = True
        self._sampler.begin()

    def _describe(self, optimizer: Optimizer, model: nn.Module, compiled: bool) -> None:
        """Find the layers, and write the header."""
        self._model, self._sampler = weakref.ref(model), LayerSampler(model, compiled_function=compiled)
        counted = _steps_of(optimizer)
        self._base = last_step(self._path) if counted is None else max(0, counted - self._steps)
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        about = {"torch": str(torch.__version__), "device": name}
        self.file.append(header(self._script, self._every, self.step, self._sampler.layers, **about))

    def _end(self) -> None:
        """Write the sample of the step that just ended, and choose the next."""
        assert self._sampler is not None
        self._sampling, losses = False, self._losses
        layers, loss, norm = self._sampler.end(), losses.loss(), losses.norm
        losses.wants_norm = False
        _wait()
        self._ended_s, self._last = time.perf_counter(), self._steps
        known = self._step_s > 0
        self._cost_s = max(0.0, self._ended_s - self._began_s - self._step_s)
        sample = Sample(
            step=self.step,
            loss=None if loss is None else significant(loss),
            gradient_norm=None if norm is None else significant(float(norm)),
            layers=layers,
            cost_ms=significant(self._cost_s * 1e3) if known else None,
            step_ms=significant(self._step_s * 1e3) if known else None,
            notes=tuple(map(scrub, self._sampler.notes)),
        )
        self.file.append(sample)
        enough = math.ceil(self._cost_s / (SHARE * self._step_s)) if known else 0
        self._due = self._steps + (self._every or max(EVERY, enough)) - 1


def monitor(
    path: Path, every: int | None, script: str, note: Callable[[str], Any], losses: Losses
) -> HealthMonitor | None:
    """Make a monitor; None, with a note, if its file cannot be written."""
    try:
        return HealthMonitor(path, every, script, note, losses)
    except UserError as error:
        note(f"FP8's health is not sampled: {error}")
        return None


def _wait() -> None:
    """Let the GPU catch up, so that a sample's cost is its own."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _steps_of(optimizer: Optimizer) -> int | None:
    """Return the steps that an optimizer counts itself, which a checkpoint restores; None if it does not."""
    state = next(iter(optimizer.state.values()), None)
    count = state.get("step") if isinstance(state, dict) else None
    return int(count) if isinstance(count, int | torch.Tensor) else None
