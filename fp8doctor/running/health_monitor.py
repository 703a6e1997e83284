"""Sample FP8's health every so many steps of a training, and append it to a file.

Between samples nothing is left on the script's objects. Without a fixed distance the next sample comes when
the last one's cost is at most `SHARE` of the time between the two.
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
from fp8doctor.health.record import FirstBad, HealthFile, Sample, header, last_step, significant
from fp8doctor.running.layer_sampler import LayerSampler
from fp8doctor.running.losses import StepLosses
from fp8doctor.running.stepped_model import held
from fp8doctor.running.trackers import log_to_trackers
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
        losses: StepLosses | None = None,
    ) -> None:
        """Write to ``path`` every so many steps. Raises `UserError` if it cannot.

        ``losses`` are those of a job that is watched anyway.
        """
        self.path, self.every, self.script, self._note = path, every, script, note
        self._file = HealthFile(path)
        self._losses = losses if losses is not None else StepLosses()
        self._own_losses = losses is None
        self._owner = os.getpid()
        self._steps = self._base = 0
        self._due = 0
        self._sampler: LayerSampler | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._sampling = False
        self._since: tuple[float, int] | None = None
        """When the last sample ended, and after which step."""
        self._began_s = 0.0
        self._cost_s = self._step_s = 0.0
        self.over = False

    @property
    def step(self) -> int:
        """The last step, counted on from a checkpoint or from the file."""
        return self._base + self._steps

    def stepped(self, optimizer: Optimizer, find: Find | None) -> None:
        """Note the end of a step: end a sample, and begin one if it is due; without ``find`` only count."""
        if self.over or os.getpid() != self._owner:
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

    def first_bad(self, bad: FirstBad) -> None:
        """Write the first bad step to the file."""
        if not self.over:
            self._file.append(bad)

    def stop(self, why: str | None = None) -> None:
        """End the sampling."""
        if self._sampling and self._sampler is not None:
            self._sampler.release()
        if self._own_losses and self._losses.active:
            self._losses.end()
        self._sampling, self.over, self._sampler = False, True, None
        if why is not None:
            self._note(why)

    def _begin(self, optimizer: Optimizer, find: Find) -> None:
        if self._model is None or self._model() is None:
            found = find()
            if found is None:
                self.stop("FP8's health was not sampled: the model was not found")
                return
            self._describe(optimizer, *found)
        assert self._sampler is not None
        _wait()
        now = time.perf_counter()
        if self._since is not None and self._steps > self._since[1]:
            self._step_s = (now - self._since[0]) / (self._steps - self._since[1])
        if self._own_losses:
            self._losses.watch(held(optimizer))
            self._losses.begin()
        self._losses.wants_norm = True
        self._losses.next_step()
        self._sampler.begin()
        self._sampling, self._began_s = True, now

    def _describe(self, optimizer: Optimizer, model: nn.Module, compiled: bool) -> None:
        """Find the layers, and write the header."""
        self._model, self._sampler = weakref.ref(model), LayerSampler(model, compiled_function=compiled)
        self._base = (
            max(_steps_of(optimizer) or last_step(self.path) + self._steps, self._steps) - self._steps
        )
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        on_gpu = device.type == "cuda"
        self._file.append(
            header(
                self.script,
                self.every,
                self.step,
                self._sampler.layers,
                torch=str(torch.__version__),
                device=torch.cuda.get_device_name(device) if on_gpu else device.type,
            )
        )

    def _end(self) -> None:
        """Write the sample of the step that just ended."""
        assert self._sampler is not None
        self._sampling = False
        layers = self._sampler.end()
        losses = self._losses
        loss, norm = losses.loss(), losses.norm
        losses.wants_norm = False
        if self._own_losses:
            losses.end()
        _wait()
        now = time.perf_counter()
        took_s = now - self._began_s
        self._cost_s = max(0.0, took_s - self._step_s) if self._step_s else took_s
        self._since = (now, self._steps)
        sample = Sample(
            step=self.step,
            loss=None if loss is None else significant(loss),
            gradient_norm=None if norm is None else significant(float(norm)),
            layers=layers,
            cost_ms=significant(self._cost_s * 1e3) if self._step_s else None,
            step_ms=significant(self._step_s * 1e3) if self._step_s else None,
            notes=tuple(map(scrub, self._sampler.notes)),
        )
        self._file.append(sample)
        log_to_trackers(sample)
        self._due = self._steps + self._distance() - 1

    def _distance(self) -> int:
        """Choose the steps to the next sample."""
        if self.every is not None:
            return self.every
        if not self._step_s:
            return EVERY
        return max(EVERY, math.ceil(self._cost_s / (SHARE * self._step_s)))


def monitor(
    path: Path, every: int | None, script: str, note: Callable[[str], Any], losses: StepLosses | None = None
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
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor) and count.numel() == 1:
            return int(count.item())
        return count if isinstance(count, int) else None
    return None
