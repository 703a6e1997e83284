"""Read the loss of each step when its backward passes begin, and the gradients' norm when they end.

Nothing waits for the GPU until someone asks: numbers are copied to pinned memory, and an event tells when
they are there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn

from fp8doctor.running.patches import Patch
from fp8doctor.stacks import recognise
from fp8doctor.stacks.looking import modules_of, parameters_of
from fp8doctor.stacks.tensors import captured, local, plain
from fp8doctor.stacks.torch_private import in_backward, without_modes
from fp8doctor.trial.copies.depth import cleaned


class Loss:
    """A copy of a loss, which the script may overwrite, on its way from a device to the host."""

    def __init__(self, loss: torch.Tensor, *, at_once: bool) -> None:
        """Fetch it ``at_once``, else when it is read: pinned memory costs the step that is timed."""
        self._event: Any = None
        self._loss = loss.detach().reshape(1).clone()
        if at_once and loss.is_cuda:
            self._loss = torch.empty(1, dtype=loss.dtype, pin_memory=True)
            self._loss.copy_(loss.detach().reshape(1), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(loss.device))

    def read(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._loss)


class Losses:
    """Hears of each backward pass of the stepping thread from `begin` to `end`.

    A pass is a micro-batch: a model may be called several times for one. ``Tensor.backward`` reads the
    patched ``torch.autograd.backward``. The passes inside of a recomputed region are none.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.step: list[Loss] = []
        """Of the passes since the last step; a distributed tensor would need a collective."""
        self.passes = 0
        """Since the last step."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients after the last pass, if `wants_norm`."""
        self.wants_norm = False
        self.at_once = False
        """Losses are read in the step that they are of."""
        self._patch = Patch(torch.autograd, "backward", self._before, self._after)
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._unread: list[tuple[int, list[Loss]]] = []
        self._bad: int | None = None

    def begin(self) -> None:
        self._patch.begin()

    def end(self) -> None:
        self._patch.end()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Read the gradients of these parameters; they are not kept alive."""
        self._parameters = [weakref.ref(each) for each in parameters]

    def next_step(self, keep: int | None = None) -> None:
        """Forget this step's numbers; ``keep`` its losses for `first_bad` under this number."""
        if self.step and keep is not None and self._bad is None:
            self._unread.append((keep, self.step))
        self.thread = get_ident()
        self.step, self.passes, self.norm = [], 0, None

    def first_bad(self) -> int | None:
        """Return the first kept step with a loss that is not finite. Waits for the GPU."""
        unread, self._unread = self._unread, []
        for step, losses in unread:
            if self._bad is None and not finite(losses):
                self._bad = step
        return self._bad

    def _before(self, *arguments: Any, **settings: Any) -> bool | None:
        """Copy the losses that a pass of ours begins at, and return True."""
        if get_ident() != self.thread or in_backward() is not False:
            return None
        self.passes += 1
        roots = arguments[0] if arguments else settings.get("tensors")
        with torch.no_grad():
            for each in (roots,) if isinstance(roots, torch.Tensor) else tuple(roots or ()):
                if type(each) is torch.Tensor and each.numel() == 1 and not captured(each):
                    self.step.append(Loss(each, at_once=self.at_once))
        return True

    def _after(self, heard: bool) -> None:
        """Read the norm of the gradients, if it is wanted."""
        groups: dict[tuple[Any, Any], list[torch.Tensor]] = {}
        for parameter in [each() for each in self._parameters] if self.wants_norm else ():
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and gradient.layout == torch.strided and gradient.numel():
                gradient = local(gradient)
                groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        norms: list[torch.Tensor] = []
        with torch.no_grad():
            for gradients in groups.values():
                if not captured(gradients[0]):
                    norms += torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
            if norms:
                whole = torch.stack([each.to(norms[0].device) for each in norms])
                self.norm = torch.linalg.vector_norm(whole.nan_to_num(nan=math.inf))


def total(losses: list[Loss]) -> float | None:
    """Add the losses of a step; None if no pass had one. Waits for the GPU's forward."""
    with without_modes():
        return sum(each.read() for each in losses) if losses else None


def finite(losses: list[Loss]) -> bool:
    return math.isfinite(total(losses) or 0.0)


AT_ONCE = 1 << 22
"""Elements of a weight that are looked at together: 16 MiB in fp32. A choice."""


@dataclass(frozen=True)
class Weight:
    """A parameter, and the module that holds it."""

    module: str
    name: str
    kind: str
    fp8: bool
    frozen: bool

    def __str__(self) -> str:
        name = f"{self.module}.{self.name}"
        if self.frozen:
            return f"The frozen {name} was not finite before training."
        return f"{name} ({self.kind}, {'FP8' if self.fp8 else 'not FP8'}) was not finite before this step."


def spoiled_weight(model: nn.Module, *, frozen: bool) -> Weight | None:
    """Find the first parameter with NaN or infinity, frozen or trained.

    Reads the tensors inside a quantized one, in this process alone. Waits for the GPU.
    """
    with torch.no_grad():
        for path, module in modules_of(model):
            for name, parameter in parameters_of(module).items():
                if parameter is None or parameter.requires_grad is frozen:
                    continue
                for inner in plain(parameter):
                    parts = torch.split(inner.flatten(), AT_ONCE) if inner.is_floating_point() else ()
                    if not all(bool(part.float().isfinite().all()) for part in parts):
                        fp8 = any(each.use == "training" for each in recognise(module, {}))
                        return Weight(cleaned(path) or "the model", name, type(module).__name__, fp8, frozen)
    return None
