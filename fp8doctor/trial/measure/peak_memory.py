"""What an arm's memory is made of: what its tensors hold is counted, activations are what is left of the
peak.

When the optimizer begins its step, all gradients lie beside the weights, their FP8 copies and the optimizer's
state: no peak is below the sum of these. A peak earlier in the step holds fewer gradients and more
activations. The two together are measured, and the line between them is a convention.

Weights take more than they hold. torch's allocator leaves up to 1 MiB at the end of a piece of memory to the
tensor in it: a layer of 11008 by 2048 in BF16 holds 43 MiB and takes 44. In the 36 blocks of a 3B model that
is 0.11 GiB, which 14.62 predicted GiB lacked (H200, torch 2.11). So the weights of a copy are counted, and
the allocator tells what the user's own take beyond what they hold.

The peak wanders. Few blocks have it where the backward ends, among the gradients of an embedding; many blocks
where it begins, if a block has more activations than gradients. Then the line through the cuts is too low: a
1.7B decoder in one graph, cut to 2 and 6 of 28 blocks, was predicted 17.5 GiB and took 21.4 (H200, torch
2.11). What is allocated when the backward begins is a straight line, and what comes on top of it in the
backward gets no more with the depth, unless the gradients outgrow the activations: then the line is right.
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

CLOSE = 1.02
"""Most / least that a peak at full depth can be, up to which their middle is taken for it: it is 1 % off at
the most then, as extrapolated peaks were."""


@dataclass(frozen=True)
class Turn:
    """One arm at one cut when its backward begins, in GiB; of several micro-batches the most."""

    allocated_gib: float
    peak_gib: float
    """Of the step until then."""


class Turns:
    """Notes what is allocated on a GPU whenever a backward begins, once it is told to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.noting = False
        self.allocated = self.peak = 0
        """In bytes; 0 where nothing was noted."""

    def note(self) -> None:
        """Remember the most that was ever there."""
        if self.noting:
            self.allocated = max(self.allocated, torch.cuda.memory_allocated(self._device))
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))

    def above(self, floor_gib: float) -> Turn | None:
        """Stop noting, and tell what was noted with so much of the arm's own beside it; None where nothing
        was."""
        self.noting = False
        if not self.allocated:
            return None
        return Turn(floor_gib + self.allocated / 2**30, floor_gib + self.peak / 2**30)


@dataclass(frozen=True)
class FullPeak:
    """What is known of the peak at full depth, in GiB."""

    least_gib: float
    most_gib: float

    @property
    def gib(self) -> float | None:
        """The middle; None where the bounds are too far apart to name one."""
        near = self.most_gib <= CLOSE * self.least_gib
        return (self.least_gib + self.most_gib) / 2 if near else None


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


def rounding(model: nn.Module, device: torch.device) -> float:
    """Tell what the weights of the user's model take of a GPU beyond what they hold, as a share of that: what
    all tensors there do. 0 where not all weights are among them, as on a CPU: a single number alone takes 128
    times what it holds. 0 too where the allocator does not count it."""
    weights = list(model.parameters())
    if device.type != "cuda" or gib(weights, device) < gib(weights, None):
        return 0.0
    counted = torch.cuda.memory_stats(device)
    holds, takes = (counted.get(f"{which}_bytes.all.current", 0) for which in ("requested", "allocated"))
    return max(0.0, takes / holds - 1.0) if holds else 0.0


def alloc_retries(device: torch.device) -> int | None:
    """Count how often the allocator gave memory back to try again; None on a CPU."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else None


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


def full_peak(
    plan: Plan, peaks: Sequence[float | None], holds: Sequence[Held], turns: Sequence[Turn | None] = ()
) -> FullPeak | None:
    """Extrapolate the peak to full depth, and never below what a step holds for sure.

    As blocks are added, the peak may move from the loss to the optimizer, or from the end of the backward to
    its beginning, and leaves the line through the cuts. Without ``turns`` it is taken for that line.
    """
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(plan.cuts):
        return None
    least = max(plan.full(known), plan.full([each.least_gib for each in holds]))
    seen = [turn for turn in turns if turn is not None]
    if plan.whole or len(seen) < len(plan.cuts):
        return FullPeak(least, least)
    least = max(least, plan.full([turn.peak_gib for turn in seen]))
    later = min(peak - turn.allocated_gib for peak, turn in zip(known, seen, strict=True))
    return FullPeak(least, max(least, plan.full([turn.allocated_gib for turn in seen]) + later))


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
