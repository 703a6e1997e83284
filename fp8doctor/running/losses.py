"""Read the loss and the gradients of each step where its backward passes begin and end.

Nothing waits for the GPU until someone asks: numbers stay on the device, or are copied to pinned memory and
an event tells when they are there.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch

from fp8doctor.running.traceback_frames import without_own_frame
from fp8doctor.stacks.tensors import captured, local
from fp8doctor.stacks.torch_private import in_backward, without_modes


class Backwards:
    """Hears of each backward pass of this thread from `begin` to `end`, with copies of its losses.

    These are a step's micro-batches: a model may be called several times for one.
    ``Tensor.backward`` reads the patched function. The passes inside of a recomputed region are none.
    """

    def __init__(self) -> None:
        self.thread, self._watches = get_ident(), False
        self.heard: Callable[[list[torch.Tensor]], object] | None = None
        """Also takes the losses, for a window."""

    def begin(self) -> None:
        """Patch ``torch.autograd.backward``."""
        own: Any = torch.autograd.backward
        watch = self

        @functools.wraps(own)  # so that it pickles
        def backward(*arguments: Any, **settings: Any) -> Any:
            then = None
            if watch._watches and get_ident() == watch.thread and in_backward() is False:
                losses = numbers(arguments[0] if arguments else settings.get("tensors"))
                if watch.heard is not None:
                    watch.heard(losses)
                then = watch.ran(losses)
            try:
                result = own(*arguments, **settings)
            except BaseException as error:
                without_own_frame(error)
                raise
            if then is not None:
                then()
            return result

        self._own, self._placed, self._watches = own, backward, True
        torch.autograd.backward = backward

    def end(self) -> None:
        """Restore it, unless other code has patched it meanwhile; a second call does nothing."""
        if self._watches and torch.autograd.backward is self._placed:
            torch.autograd.backward = self._own
        self._watches = False

    def ran(self, losses: list[torch.Tensor]) -> Callable[[], None] | None:
        """Take the losses of a pass that begins; may return a function to call after the pass."""
        raise NotImplementedError


_log = logging.getLogger("fp8doctor")


def numbers(roots: Any) -> list[torch.Tensor]:
    """Copy the losses that a backward pass begins at; a distributed tensor would need a collective."""
    try:
        with torch.no_grad(), without_modes():
            return [
                each.detach().reshape(1).clone()
                for each in ((roots,) if isinstance(roots, torch.Tensor) else tuple(roots or ()))
                if type(each) is torch.Tensor and each.numel() == 1 and not captured(each)
            ]
    except Exception:
        _log.debug("a loss could not be read", exc_info=True)
        return []


class LossLog(Backwards):
    """Keeps copies of each step's losses. Only `first_bad` waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._step: list[torch.Tensor] = []
        self._unread: list[tuple[int, list[torch.Tensor]]] = []
        self._bad: int | None = None

    def stepped(self, step: int) -> None:
        """Note the end of this step of an optimizer."""
        if self._step:
            self._unread.append((step, self._step))
        self._step = []

    def first_bad(self) -> int | None:
        """Return the first step with a loss that is not finite, None if none was seen."""
        unread, self._unread = self._unread, []
        with without_modes():
            for step, losses in unread:
                if self._bad is None and not all(math.isfinite(float(each)) for each in losses):
                    self._bad = step
        return self._bad

    def ran(self, losses: list[torch.Tensor]) -> None:
        """Keep them, until one was not finite."""
        self._step += losses if self._bad is None else ()


SHARE = 0.004
"""Largest share of the host's time for reading gradients. Short steps have them read in some steps only."""


class _Fetched:
    """A loss of `numbers` on its way from a device to the host."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._event: Any = None
        self._loss = loss
        if loss.is_cuda:
            self._loss = torch.empty(1, dtype=loss.dtype, pin_memory=True)
            self._loss.copy_(loss, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(loss.device))

    def read(self) -> float:
        """Return the number; wait if it has not arrived."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._loss)


class StepLosses(Backwards):
    """Notes losses and gradients; `next_step` forgets a step's."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._losses: list[_Fetched] = []
        self.largest: tuple[list[int], list[torch.Tensor]] | None = None
        """Indices of parameters, and the largest magnitude of each's gradient after the last pass."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients after the last pass, if `wants_norm`."""
        self.wants_norm = False
        self._rest = 0
        """Steps to come whose gradients are not read."""
        self._took_s = self._last_s = 0.0

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Read the gradients of these parameters; they are not kept alive."""
        self._parameters = [weakref.ref(each) for each in parameters]

    @property
    def parameters(self) -> list[torch.Tensor | None]:
        return [each() for each in self._parameters]

    def next_step(self) -> None:
        """Forget this step's numbers."""
        self._losses, self.largest, self.norm = [], None, None
        now_s = time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        self._rest = max(0, (math.ceil(self._took_s / (SHARE * step_s)) if self._took_s else self._rest) - 1)
        self._took_s = 0.0

    def loss(self) -> float | None:
        """Return the step's loss, None if no backward pass had one. Waits for the GPU's forward."""
        return sum(each.read() for each in self._losses) if self._losses else None

    def ran(self, losses: list[torch.Tensor]) -> Callable[[], None] | None:
        """Fetch the losses, and the gradients after the pass."""
        with without_modes():
            self._losses += map(_Fetched, losses)
        return self._after if self._parameters and (self.wants_norm or not self._rest) else None

    def _after(self) -> None:
        """Measure the gradients."""
        began_s = time.perf_counter()
        try:
            with torch.no_grad(), without_modes():
                self.largest = self._norms(math.inf)
                if self.wants_norm:
                    norms = self._norms(2.0)[1]
                    whole = torch.stack([each.to(norms[0].device) for each in norms])
                    self.norm = torch.linalg.vector_norm(whole.nan_to_num(nan=math.inf))
        except Exception:
            _log.debug("the gradients could not be read", exc_info=True)
        if not self.wants_norm:
            self._took_s += time.perf_counter() - began_s

    def _norms(self, order: float) -> tuple[list[int], list[torch.Tensor]]:
        """Compute a norm of each gradient."""
        groups: dict[tuple[Any, Any], tuple[list[int], list[torch.Tensor]]] = {}
        for place, parameter in enumerate(self.parameters):
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.numel():
                gradient = local(gradient)
                places, gradients = groups.setdefault((gradient.device, gradient.dtype), ([], []))
                places.append(place)
                gradients.append(gradient)
        norms: list[torch.Tensor] = []
        for _, gradients in groups.values():
            if not captured(gradients[0]):
                norms += torch._foreach_norm(gradients, order, dtype=torch.float32)
        return [place for places, _ in groups.values() for place in places], norms
