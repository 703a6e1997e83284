"""Read the loss and the gradients of each step where its backward passes begin and end.

Nothing waits for the GPU until someone asks: numbers are copied to pinned memory, and an event tells when
they are there.
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn

from fp8doctor.running.patches import Patch
from fp8doctor.stacks.looking import modules_of, parameters_of
from fp8doctor.stacks.tensors import captured, local, plain
from fp8doctor.stacks.torch_private import in_backward, without_modes

SHARE = 0.004
"""Largest share of the host's time for reading gradients. Short steps have them read in some steps only."""


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
        self.largest: tuple[list[int], list[torch.Tensor]] | None = None
        """Indices of parameters, and the largest magnitude of each's gradient after the last pass."""
        self.norm: torch.Tensor | None = None
        """Norm of all gradients after the last pass, if `wants_norm`."""
        self.wants_norm = self.wants_largest = False
        self.look: Callable[[torch.Tensor], None] | None = None
        """Is called with the losses, while their graphs are alive."""
        self._patch = Patch(torch.autograd, "backward", self._before, self._after)
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._unread: list[tuple[int, list[Loss]]] = []
        self._bad: int | None = None
        self._rest = 0
        """Steps to come whose gradients are not read."""
        self._took_s = self._last_s = 0.0

    def begin(self) -> None:
        self._patch.begin()

    def end(self) -> None:
        self._patch.end()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Read the gradients of these parameters; they are not kept alive."""
        self._parameters = [weakref.ref(each) for each in parameters]

    @property
    def parameters(self) -> list[torch.Tensor | None]:
        return [each() for each in self._parameters]

    def next_step(self, keep: int | None = None) -> None:
        """Forget this step's numbers; ``keep`` its losses for `first_bad` under this number."""
        if self.step and keep is not None and self._bad is None:
            self._unread.append((keep, self.step))
        self.thread = get_ident()
        self.step, self.passes, self.largest, self.norm = [], 0, None, None
        now_s = time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        self._rest = max(0, (math.ceil(self._took_s / (SHARE * step_s)) if self._took_s else self._rest) - 1)
        self._took_s = 0.0

    def first_bad(self) -> int | None:
        """Return the first kept step with a loss that is not finite, None if none was seen."""
        unread, self._unread = self._unread, []  # read once: a later crash may take the GPU's context
        for step, losses in unread:
            if self._bad is None and not math.isfinite(total(losses) or 0.0):
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
                    self.step.append(Loss(each, at_once=self.wants_largest))
                    if self.look is not None:
                        self.look(each)
        return True

    def _after(self, heard: bool) -> None:
        """Read the gradients, if they are wanted."""
        if not self._parameters or not (self.wants_norm or (self.wants_largest and not self._rest)):
            return
        began_s = time.perf_counter()
        with torch.no_grad():
            self.largest = self._norms(math.inf)
            if self.wants_norm:
                norms = self._norms(2.0)[1]
                whole = torch.stack([each.to(norms[0].device) for each in norms])
                self.norm = torch.linalg.vector_norm(whole.nan_to_num(nan=math.inf))
        if not self.wants_norm:
            self._took_s += time.perf_counter() - began_s

    def _norms(self, order: float) -> tuple[list[int], list[torch.Tensor]]:
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


def in_graphs(loss: torch.Tensor) -> set[int]:
    """Find the ids of parameters whose gradients compiled code computes, by AOTAutograd's nodes."""
    found, seen, left = set[int](), set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [each for each, _ in node.next_functions]
        if node.name() == "CompiledFunctionBackward":
            leaves = [each for each in below if each and each.name() == "torch::autograd::AccumulateGrad"]
            found |= {id(each.variable) for each in leaves}  # type: ignore[attr-defined]
        left += below
    return found


def total(losses: list[Loss]) -> float | None:
    """Add the losses of a step; None if no pass had one. Waits for the GPU's forward."""
    with without_modes():
        return sum(each.read() for each in losses) if losses else None


AT_ONCE = 1 << 22
"""Elements of a weight that are looked at together: 16 MiB in fp32. A choice."""

Owner = tuple[str, nn.Module, nn.Parameter, str]
"""A module's name, the module, one of its parameters, and the parameter's name."""


def owners(model: nn.Module) -> Iterator[Owner]:
    """Yield module, parameter and its name in the module, in the model's order; shared ones once."""
    seen: set[int] = set()
    for name, module in modules_of(model):
        for key, parameter in parameters_of(module).items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, module, parameter, key


def spoiled(model: nn.Module) -> Owner | None:
    """Find the first parameter with NaN or infinity.

    Reads the tensors of this process, those inside a quantized one too. Waits for the GPU.
    """
    with torch.no_grad():
        for owner in owners(model):
            for inner in plain(owner[2]):
                parts = torch.split(inner.flatten(), AT_ONCE) if inner.is_floating_point() else ()
                if not all(bool(part.float().isfinite().all()) for part in parts):
                    return owner
    return None
