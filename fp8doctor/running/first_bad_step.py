"""Find the first step whose loss or gradient is not finite, and the layer where it started.

The loss is read before the optimizer steps, when its forward is long done. The weights are still those that
gave it, so the batch runs forward once more, and the first module with an output that is not finite is named.
Gradients that are not finite show in the next step's loss, so nothing waits for them. A backward pass spoils
all layers before the one where it started, so the last spoiled layer is named.

`LongWatch` looks for it to the script's end with ``--stop-on-nan`` or ``--health``, and samples FP8's health.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fp8doctor.health.record import FirstBad
from fp8doctor.running.calls import Called, Calls
from fp8doctor.running.health_monitor import monitor
from fp8doctor.running.layer_sampler import rerun, torch_autocast
from fp8doctor.running.losses import StepLosses
from fp8doctor.running.script_messages import Message, Note, Progress, WatchOptions
from fp8doctor.running.stepped_model import Ownership, held
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import recognise
from fp8doctor.stacks.looking import class_name, modules_of
from fp8doctor.stacks.tensors import local, stored, tensors
from fp8doctor.stacks.torch_private import frames_compiled, in_backward, without_modes
from fp8doctor.stacks.transformer_engine import PREFIX as TRANSFORMER_ENGINE
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.state.library_state import open_autocast
from fp8doctor.wording import plural, sentence

_log = logging.getLogger("fp8doctor")

KEPT = 2
"""Steps whose gradients are kept: weights that are not finite spoil the next step's loss."""

LARGEST = 2**26
"""Most bytes of a batch that is kept until its step ends. A choice."""


@dataclass(frozen=True)
class _Call:
    """The arguments of the model's last call, and what was open around it."""

    module: weakref.ref[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: tuple[Callable[[], AbstractContextManager[object]], ...]


class BadStepWatch:
    """Watches losses and gradients of a training until the first that is not finite."""

    def __init__(self, losses: StepLosses, tell: Callable[[FirstBad], object]) -> None:
        self._losses, self._tell = losses, tell
        self._model: weakref.ref[nn.Module] | None = None
        self._last: _Call | None = None
        self._recent: deque[tuple[int, list[int], list[torch.Tensor]]] = deque(maxlen=KEPT)
        """Largest magnitudes of gradients, on the device."""
        self._calls: Calls | None = None
        self.found: FirstBad | None = None

    def watch(self, model: nn.Module, called: tuple[nn.Module, ...], parameters: list[Any]) -> None:
        """Name layers of this model; ``called`` are the modules whose calls give the batch."""
        self._model = weakref.ref(model)
        self._losses.watch(parameters)
        self.release()
        self._calls = Calls(called, self.called)
        self._calls.begin()

    def release(self) -> None:
        """Take the marks off the model's class, and forget the batch."""
        if self._calls is not None:
            self._calls.end()
        self._calls = self._last = None

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep a call's arguments until the next, or the step's end."""
        if in_backward() is not False or not torch.is_grad_enabled():
            return
        given = list(tensors((args, kwargs)))
        small = sum(each.numel() * each.element_size() for each in given) <= LARGEST
        around = (open_autocast(), torch_autocast(given))
        self._last = _Call(weakref.ref(module), args, kwargs, around) if small else None

    def before_step(self, step: int) -> None:
        """Look at the loss. Waits for the forward, which the GPU has done long before the host is here."""
        if self.found is None and (loss := self._losses.loss()) is not None and not math.isfinite(loss):
            self.ended()
            if self.found is None:
                self._report(step, "loss", *self._where())

    def after_step(self, step: int) -> None:
        """Keep the gradients' magnitudes until a loss is not finite, and forget the batch."""
        self._last = None
        if self.found is None and self._losses.largest is not None:
            self._recent.append((step, *self._losses.largest))

    def ended(self) -> None:
        """Look at the last gradients."""
        while self.found is None and self._recent:
            self._look(*self._recent.popleft())

    def _look(self, step: int, places: list[int], largest: list[torch.Tensor]) -> None:
        numbers = zip(places, (float(each) for each in largest), strict=True)
        spoiled = [place for place, each in numbers if not math.isfinite(each)]
        if not spoiled:
            return
        parameters, model = self._losses.parameters, None if self._model is None else self._model()
        bad = {id(parameters[place]) for place in spoiled}
        owners = [] if model is None else [each for each in _owners(model) if id(each[2]) in bad]
        if not owners:
            self._report(step, "gradient", None, None, "")
            return
        name, module = owners[-1][:2]
        kind = next(each[3] for each in owners if each[1] is module)
        note = f"{len(owners)} of {plural(len(places), 'gradient')} are not finite, up to this layer."
        self._report(step, "gradient", (name, module), f"gradient of its {kind}", note)

    def _where(self) -> tuple[tuple[str, nn.Module] | None, str | None, str]:
        """Find where a loss that is not finite started."""
        model = None if self._model is None else self._model()
        if model is None:
            return None, None, ""
        try:
            with without_modes(), torch.no_grad():
                for name, module, parameter, kind in _owners(model):
                    if not _finite(stored(local(parameter))):  # of this process alone
                        return (name, module), kind, "It was not finite before this step."
                return self._run_again(model)
        except Exception:
            _log.debug("the batch could not be run again", exc_info=True)
            return None, None, "The batch could not be run again."

    def _run_again(self, model: nn.Module) -> tuple[tuple[str, nn.Module] | None, str | None, str]:
        last = self._last
        called = last.module() if last is not None else None
        if last is None or called is None:
            return None, None, "All weights are finite. The batch was not seen."
        if any(class_name(type(each)).startswith(TRANSFORMER_ENGINE) for each in model.modules()):
            return None, None, "All weights are finite. Transformer Engine's layers are not run again."
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return (
                None,
                None,
                "All weights are finite. The batch is not run again without the other processes.",
            )
        if not all(_finite(each) for each in tensors((last.args, last.kwargs))):
            return None, None, "The batch itself is not finite."
        spoiled: list[tuple[str, nn.Module, str]] = []
        names = {id(module): name for name, module in modules_of(model)}

        def note(module: nn.Module, given: Any, output: Any) -> None:
            if not spoiled and not all(map(_finite, tensors(output))):
                tensor = "output" if all(map(_finite, tensors(given))) else "input"
                spoiled.append((names[id(module)], module, tensor))

        with rerun(called) as again, ExitStack() as around:
            for context in last.around:
                around.enter_context(context())
            for _, module in modules_of(model):
                around.callback(module.register_forward_hook(note).remove)
            again(*last.args, **last.kwargs)
        if not spoiled:
            return None, None, "The model's output is finite: the loss function gave it."
        name, module, tensor = spoiled[0]
        return (name, module), tensor, "All weights are finite, and all that was computed before it."

    def _report(
        self, step: int, what: str, where: tuple[str, nn.Module] | None, tensor: str | None, note: str
    ) -> None:
        name, fp8, started = None, None, ""
        if where is not None:
            name = cleaned(where[0]) or "the model"
            fp8 = any(each.use == "training" for each in recognise(where[1], {}))
            kind = f"{type(where[1]).__name__}, {'FP8' if fp8 else 'not FP8'}"
            started = f" It started in {name} ({kind}): {tensor}."
        sentence = f"step {step:,}: the {what} is not finite.{started} {note}".strip()
        self.found = FirstBad(step, what, name, tensor, fp8, sentence)
        self._recent.clear()
        self.release()
        self._tell(self.found)


def _owners(model: nn.Module) -> list[tuple[str, nn.Module, nn.Parameter, str]]:
    """List module, parameter and its name in the module, in the model's order; shared ones once."""
    seen: set[int] = set()
    found = []
    for name, module in modules_of(model):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((name, module, parameter, key))
    return found


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


STOPPED = 1
"""Exit code of a script that ``--stop-on-nan`` stops."""


class LongWatch:
    """Watches every step of the main optimizer, if asked; no hook is left on modules between samples."""

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
    def found(self) -> FirstBad | None:
        """The first step that is not finite so far."""
        return self._bad.found

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
