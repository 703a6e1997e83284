"""Watch a script to its end: the first step that is not finite, and FP8's health if asked for."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8doctor.health.record import FirstBad
from fp8doctor.running.calls import Called
from fp8doctor.running.first_bad_step import BadStepWatch
from fp8doctor.running.health_monitor import monitor
from fp8doctor.running.losses import StepLosses
from fp8doctor.running.script_messages import Message, Note, Progress, WatchOptions
from fp8doctor.running.stepped_model import Ownership, held
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

STOPPED = 1
"""Exit code of a script that ``--stop-on-nan`` stops."""


class LongWatch:
    """Watches every step of the main optimizer; no hook is left on the script's modules between samples."""

    def __init__(self, settings: WatchOptions, send: Callable[[Message], None]) -> None:
        self._stops, self._send = settings.stop_on_nan, send
        self._losses = StepLosses()
        self._bad = BadStepWatch(self._losses, self._tell)
        self._health = None
        if settings.health is not None:
            path = Path(settings.health)
            self._health = monitor(path, settings.every, settings.script, self._note, self._losses)
        self._first: weakref.ref[Any] | None = None
        """First parameter of the main optimizer."""
        self._find: Callable[[], tuple[nn.Module, bool] | None] = lambda: None
        self._steps, self._over = 0, False
        self._frames = frames_compiled()

    def install(self) -> None:
        """Watch backward passes and the beginning of optimizer steps."""
        self._losses.begin()
        self._removable = register_optimizer_step_pre_hook(self._before)

    @property
    def called(self) -> Called:
        """Listener for calls of the model, for a window that watches them anyway."""
        return self._bad.called

    def know(self, found: Ownership | None, optimizer: Optimizer) -> None:
        """Name the layers of this model, and keep its batches. A later call replaces it."""
        parameters = held(optimizer)
        if found is None or not parameters:
            return
        self._first, model = weakref.ref(parameters[0]), weakref.ref(found.model)
        function = frames_compiled() > self._frames and not found.compiled
        self._find = lambda: None if (alive := model()) is None else (alive, function)
        if self._bad.found is None:
            self._bad.watch(found.model, () if function else found.callable, parameters)

    def release(self) -> None:
        """Take the mark off the model's class, for as long as others watch its calls."""
        self._bad.release()

    def stepped(self, optimizer: Optimizer, *, sample: bool) -> None:
        """Note the end of a step; with ``sample``, health may be sampled from now on."""
        if not self._over and self._is_main(optimizer):
            with self._guarded():
                self._steps += 1
                self._bad.after_step(self._step)
                if self._health is not None:
                    self._health.stepped(optimizer, self._find if sample else None)
                self._losses.next_step()
            self._stop()

    def ended(self) -> None:
        """End the watching with the script."""
        self._removable.remove()
        self._bad.ended()
        self._bad.release()
        self._losses.end()
        if self._health is not None:
            self._health.stop()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (self._over or torch.compiler.is_compiling()) and self._is_main(optimizer):
            with self._guarded():
                self._bad.before_step(self._step + 1)
            self._stop()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the watching at a failure of ours, which never reaches the script."""
        try:
            with signals_deferred():
                yield
        except Exception as error:
            _log.debug("the long watch failed", exc_info=True)
            self._over = True
            self.release()
            self._losses.end()
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
        if self._stops and self._bad.found is not None:
            raise SystemExit(STOPPED)

    def _tell(self, bad: FirstBad) -> None:
        """Say at once where it started."""
        self._send(Progress(bad.sentence))
        self._send(Note(bad.sentence))
        if self._health is not None:
            self._health.file.append(bad)

    def _note(self, text: str) -> None:
        self._send(Note(text))
