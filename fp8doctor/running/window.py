"""The window: a few of the script's own steps, timed, with one batch of theirs."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

from fp8doctor.facts import Observation
from fp8doctor.running.calls import Calls
from fp8doctor.running.capture import Capture
from fp8doctor.running.loader_waits import LoaderWaits

FEWEST_STEPS = 3
"""Steps from which on a window that was cut short still tells a median."""


class _Step:
    """What is noted while a step runs."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first_call: float | None = None
        self.calls, self.batches, self.waited_s = 0, 0, 0.0


class Window:
    """Times steps from `begin` to `end`. Outside of that nothing of it is in the script's way."""

    def __init__(self, steps: int, warmup: int, modules: tuple[nn.Module, ...], *, capture: bool) -> None:
        self.steps, self.warmup = steps, warmup
        self.captured: Capture | None = None
        self._captures = capture
        self._calls, self._waits = Calls(modules, self._called), LoaderWaits(self._waited)
        self._done: list[_Step] = []
        self._ms: list[float] = []
        parameter = next((each for module in modules for each in module.parameters()), None)
        self._cuda = parameter is not None and parameter.is_cuda
        self._marks: list[Any] = []
        self._frames = frames_compiled()
        self.marked = bool(modules)
        """Whether calls of a model could be seen."""

    def begin(self) -> None:
        """Watch from here, the end of a step, on."""
        self._calls.begin()
        self._waits.begin()
        self._mark()
        self._step = _Step()

    def stepped(self) -> bool:
        """Note that a step has ended; whether it was the last of the window."""
        self._ms.append((time.perf_counter() - self._step.began) * 1e3)
        self._done.append(self._step)
        self._mark()
        self._step = _Step()
        return len(self._done) >= self.steps

    def end(self) -> None:
        """Take everything out of the script's way."""
        self._calls.end()
        self._waits.end()

    def observation(self, optimizers: tuple[str, ...], share: float) -> Observation | None:
        """What the window tells; None where it is too short."""
        if len(self._done) < FEWEST_STEPS:
            return None
        firsts = [(each.first_call - each.began) * 1e3 for each in self._done if each.first_call is not None]
        return Observation(
            steps_ms=tuple(self._cuda_ms() if self._cuda else self._ms),
            warmup=self.warmup,
            clock="cuda" if self._cuda else "host",
            data_ms=tuple(each.waited_s * 1e3 for each in self._done)
            if any(each.batches for each in self._done)
            else None,
            before_forward_ms=tuple(firsts) if len(firsts) == len(self._done) else None,
            calls=self.calls,
            compiled=frames_compiled() - self._frames,
            optimizers=optimizers,
            share_pct=100 * share,
        )

    @property
    def calls(self) -> int | None:
        """Training calls of the model in a step; None where they differ or none was seen."""
        counts = {each.calls for each in self._done}
        return counts.pop() if len(counts) == 1 and counts != {0} else None

    def _mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record()

    def _cuda_ms(self) -> list[float]:
        torch.cuda.synchronize()
        return [float(a.elapsed_time(b)) for a, b in zip(self._marks, self._marks[1:], strict=False)]

    def _waited(self, seconds: float) -> None:
        """A wait that the GPU's work covers costs nothing."""
        self._step.batches += 1
        if not self._cuda or self._marks[-1].query():
            self._step.waited_s += seconds

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return None
        step = self._step
        step.calls += 1
        if step.first_call is None:
            step.first_call = time.perf_counter()
        if self._captures and self.captured is None and len(self._done) == self.steps - 1:
            self.captured = Capture(module, args, kwargs)
            return self.captured.returned
        return None


def frames_compiled() -> int:
    """Frames that Dynamo has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["frames"]["ok"] if utils is not None else 0
