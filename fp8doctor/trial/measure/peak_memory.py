"""Divide a variant's peak memory, and extrapolate it to full depth.

Weights, FP8 copies, optimizer state and gradients are counted when the optimizer begins its step; activations
are the rest of the peak. A peak earlier in the step holds fewer gradients and more activations: the line
between the two is a convention.

Weights take more than they hold, because torch's allocator rounds up: 0.11 GiB in the 36 blocks of a 3B model
(H200, torch 2.11). The allocator's own count for the user's weights gives the share.

The peak moves with the depth. Few blocks have it at the end of the backward, among an embedding's gradients;
many blocks at its beginning, if a block has more activations than gradients. The line through two depths is
then too low: a 1.7B decoder in one graph at 2 and 6 of 28 blocks was predicted 17.5 GiB and took 21.4 (H200,
torch 2.11). The memory at the beginning of the backward is a straight line. What the backward adds to it does
not grow with the depth, unless gradients outgrow activations: then the line through the peaks is right. The
higher of the two counts; in 109 of 111 recorded variants they are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fp8doctor.facts import MemoryParts
from fp8doctor.stacks import fp8_copies
from fp8doctor.stacks.tensors import plain, tensors
from fp8doctor.trial.copies.depth import Plan


@dataclass(frozen=True)
class Turn:
    """Memory when a backward begins, in GiB; the most of a step's micro-batches."""

    allocated_gib: float
    peak_gib: float
    """The peak until then."""


class Turns:
    """Notes what is allocated on a GPU whenever a backward begins, while ``noting``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.noting = False
        self.allocated = self.peak = 0
        """In bytes; 0 if nothing was noted."""

    def note(self) -> None:
        """Remember the most so far."""
        if self.noting:
            self.allocated = max(self.allocated, torch.cuda.memory_allocated(self._device))
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))

    def above(self, floor_gib: float) -> Turn | None:
        """Stop noting, and add ``floor_gib`` to what was noted; None if nothing was."""
        self.noting = False
        if not self.allocated:
            return None
        return Turn(floor_gib + self.allocated / 2**30, floor_gib + self.peak / 2**30)


@dataclass(frozen=True)
class Held:
    """What the tensors of a variant hold on its device at one depth, in GiB."""

    weights_gib: float
    """Parameters and buffers."""
    fp8_copies_gib: float
    optimizer_gib: float
    gradients_gib: float | None
    """As the optimizer found them; None if it has no hook for that."""

    @property
    def static_gib(self) -> float:
        """Sum up what is allocated between two steps."""
        return self.weights_gib + self.fp8_copies_gib + self.optimizer_gib

    @property
    def least_gib(self) -> float:
        """Sum up what a step holds at least."""
        return self.static_gib + (self.gradients_gib or 0.0)


class Gradients:
    """The gradients of one variant."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        groups = (group["params"] for group in optimizer.param_groups)
        self._parameters = {id(each): each for each in chain(model.parameters(), *groups)}
        self._device = device
        self.found_gib: float | None = None
        """At the beginning of the optimizer's last step; None before the first."""

    def now_gib(self) -> float:
        """Count the gradients that exist now."""
        return gib((each.grad for each in self._parameters.values() if each.grad is not None), self._device)

    def note(self, *arguments: Any) -> None:
        """Remember the gradients that exist now."""
        self.found_gib = self.now_gib()


def rounding(model: nn.Module, device: torch.device) -> float:
    """Return the share by which tensors on the GPU take more than they hold.

    0 on a CPU, and if not all weights are on the GPU: a single number alone takes 128 times what it holds.
    """
    weights = list(model.parameters())
    if device.type != "cuda" or gib(weights, device) < gib(weights, None):
        return 0.0
    counted = torch.cuda.memory_stats(device)
    holds, takes = (counted.get(f"{which}_bytes.all.current", 0) for which in ("requested", "allocated"))
    return max(0.0, takes / holds - 1.0) if holds else 0.0


def alloc_retries(device: torch.device) -> int | None:
    """Count how often the allocator freed memory to try again; None on a CPU."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else None


@contextmanager
def gradients_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[Gradients]:
    """Note the gradients whenever the optimizer begins a step inside."""
    gradients = Gradients(model, optimizer, device)
    register = getattr(optimizer, "register_step_pre_hook", None)  # only torch.optim.Optimizer has it
    handle = register(gradients.note) if register else None
    try:
        yield gradients
    finally:
        if handle is not None:
            handle.remove()


def held(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients_gib: float | None, device: torch.device
) -> Held:
    """Count the tensors of a variant that took a step, each once."""
    copies = [each for module in model.modules() for each in fp8_copies(module)]
    copies_gib = gib(copies, device)
    return Held(
        weights_gib=gib((*model.parameters(), *model.buffers(), *copies), device) - copies_gib,
        fp8_copies_gib=copies_gib,
        optimizer_gib=gib(tensors(optimizer.state), device),
        gradients_gib=gradients_gib,
    )


def gib(counted: Iterable[Tensor], device: torch.device | None) -> float:
    """Count the GiB that tensors, or a subclass's inner ones, hold on a device or any."""
    inner = {id(each): each for tensor in counted for each in plain(tensor)}
    return (
        sum(
            each.numel() * each.element_size()
            for each in inner.values()
            if device is None or each.device.type == device.type
        )
        / 2**30
    )


def full_peak(
    plan: Plan, peaks: Sequence[float | None], holds: Sequence[Held], turns: Sequence[Turn | None] = ()
) -> float | None:
    """Extrapolate the peak to full depth in GiB, and never below what a step holds at least.

    Without ``turns`` it is the line through the depths.
    """
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(plan.cuts):
        return None
    least = max(plan.full(known), plan.full([each.least_gib for each in holds]))
    seen = [turn for turn in turns if turn is not None]
    if plan.whole or len(seen) < len(plan.cuts):
        return least
    later = min(peak - turn.allocated_gib for peak, turn in zip(known, seen, strict=True))
    in_backward = plan.full([turn.allocated_gib for turn in seen]) + later
    return max(least, plan.full([turn.peak_gib for turn in seen]), in_backward)


def memory_parts(plan: Plan, peak_gib: float | None, holds: Sequence[Held]) -> MemoryParts | None:
    """Divide the peak at full depth; None if a peak or the gradients are not known."""
    gradients = [each.gradients_gib for each in holds if each.gradients_gib is not None]
    if peak_gib is None or len(gradients) < len(plan.cuts):
        return None
    return MemoryParts(
        weights_gib=plan.full([each.weights_gib for each in holds]),
        fp8_copies_gib=plan.full([each.fp8_copies_gib for each in holds]),
        gradients_gib=plan.full(gradients),
        optimizer_gib=plan.full([each.optimizer_gib for each in holds]),
        activations_gib=peak_gib - plan.full([each.least_gib for each in holds]),
    )
