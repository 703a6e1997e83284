"""What an arm's memory is made of: what its tensors hold is counted, activations are what is left of the
peak.

When the optimizer begins its step, all gradients lie beside the weights, their FP8 copies and the optimizer's
state: no peak is below the sum of these. A peak earlier in the step holds fewer gradients and more
activations. The two together are measured, and the line between them is a convention.
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
from fp8doctor.stacks.tensors import plain
from fp8doctor.trial.copies.depth import Plan
from fp8doctor.trial.copies.step import tensors


@dataclass(frozen=True)
class Held:
    """What the tensors of one arm at one cut hold on its device, in GiB."""

    weights_gib: float
    """Parameters and buffers."""
    fp8_copies_gib: float
    optimizer_gib: float
    gradients_gib: float | None
    """As the optimizer found them; None where it does not tell when it begins."""

    @property
    def static_gib(self) -> float:
        """Sum up what is there between two steps."""
        return self.weights_gib + self.fp8_copies_gib + self.optimizer_gib

    @property
    def least_gib(self) -> float:
        """Sum up what a step holds for sure."""
        return self.static_gib + (self.gradients_gib or 0.0)


class Gradients:
    """The gradients of one arm."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        groups = (group["params"] for group in optimizer.param_groups)
        self._parameters = {id(each): each for each in chain(model.parameters(), *groups)}
        self._device = device
        self.found_gib: float | None = None
        """At the beginning of the optimizer's last step; None before one."""

    def now_gib(self) -> float:
        """Count those that are there now."""
        return gib((each.grad for each in self._parameters.values() if each.grad is not None), self._device)

    def note(self, *arguments: Any) -> None:
        """Remember what is there now."""
        self.found_gib = self.now_gib()


@contextmanager
def gradients_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[Gradients]:
    """Look at the gradients whenever the optimizer begins a step inside."""
    gradients = Gradients(model, optimizer, device)
    register = getattr(
        optimizer, "register_step_pre_hook", None
    )  # of torch.optim.Optimizer; another class may have none
    handle = register(gradients.note) if register else None
    try:
        yield gradients
    finally:
        if handle is not None:
            handle.remove()


def held(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients_gib: float | None, device: torch.device
) -> Held:
    """Count the tensors of an arm that took a step, each once."""
    copies = [each for module in model.modules() for each in fp8_copies(module)]
    copies_gib = gib(copies, device)
    return Held(
        weights_gib=gib((*model.parameters(), *model.buffers(), *copies), device) - copies_gib,
        fp8_copies_gib=copies_gib,
        optimizer_gib=gib(tensors(optimizer.state), device),
        gradients_gib=gradients_gib,
    )


def gib(counted: Iterable[Tensor], device: torch.device | None) -> float:
    """Count the GiB that tensors hold on a device, or on any, each tensor once; of a subclass what is inside
    it."""
    inner = {id(each): each for tensor in counted for each in plain(tensor)}
    return (
        sum(
            each.numel() * each.element_size()
            for each in inner.values()
            if device is None or each.device.type == device.type
        )
        / 2**30
    )


def full_peak(plan: Plan, peaks: Sequence[float | None], holds: Sequence[Held]) -> float | None:
    """Extrapolate the peak to full depth, and never below what a step holds for sure.

    Where the activations of a block are smaller than its gradients, the peak moves from the loss to the
    optimizer as blocks are added, and leaves the line through the cuts.
    """
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(plan.cuts):
        return None
    return max(plan.full(known), plan.full([each.least_gib for each in holds]))


def memory_parts(plan: Plan, peak_gib: float | None, holds: Sequence[Held]) -> MemoryParts | None:
    """Divide the peak at full depth; None without a peak, or where an optimizer does not tell its
    gradients."""
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
