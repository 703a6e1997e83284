"""Measure a variant's memory, divide its peak, and extrapolate it.

Weights, FP8 copies, optimizer state and gradients are counted when the optimizer begins its step; activations
are the rest of the peak, with the batch, cuBLAS's workspaces and what the job holds apart from its model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fp8doctor.facts import MemoryParts
from fp8doctor.loading.job import Job
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.looking import parameters_in
from fp8doctor.stacks.tensors import plain, tensors
from fp8doctor.trial.copies.depth import Plan

ROOMY, LEAVES = 0.2, 0.4
"""A deep model is timed whole if weights and gradients take at most the first share of the GPU's memory, and
its first step leaves the second. A choice: Adam's moments take as much again, and other variants may take
more than the step as it is."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of one step of a variant at one depth, in GiB."""

    weights_gib: float
    """Parameters and buffers."""
    optimizer_gib: float
    gradients_gib: float | None
    """As the optimizer found them; None if it has no hook for that."""
    peak_gib: float | None = None
    """None on a CPU, and if the allocator does not count all."""
    backward_gib: float | None = None
    """The most that is allocated when a backward begins."""
    forward_peak_gib: float | None = None
    """The peak until then."""

    @property
    def least_gib(self) -> float:
        """Sum up what a step holds at least."""
        return self.weights_gib + self.optimizer_gib + (self.gradients_gib or 0.0)


class MemoryWatch:
    """Watches the memory of a variant's steps; `begin` starts the one that counts.

    ``batch`` is what they are fed with, which is there before and after them, as is what the job holds
    apart from its model (`held_apart`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        batch: Any = None,
        apart_gib: float = 0.0,
    ) -> None:
        self.model, self.optimizer, self._device = model, optimizer, device
        self._batch, self._apart_gib = batch, apart_gib
        self._begun: tuple[int, float] | None = None
        """Bytes allocated, and GiB of gradients that existed, when the step began."""
        self._backward = self._forward_peak = 0
        self._gradients_gib: float | None = None

    def at_update(self, *_: object) -> None:
        """Count the gradients; called when the optimizer begins its step."""
        self._gradients_gib = self._now_gib()

    def _now_gib(self) -> float:
        held = chain(self.model.parameters(), parameters_in(self.optimizer))
        parameters = {id(each): each for each in held}
        return gib((each.grad for each in parameters.values() if each.grad is not None), self._device)

    def begin(self) -> None:
        """Begin the step that counts; nothing on a CPU.

        It makes cuBLAS's workspaces again, so they are in its peak: 64 to 66 MiB (H200, torch 2.11).
        """
        if self._device.type == "cuda":
            torch_private.clear_cublas_workspaces()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._begun = torch.cuda.memory_allocated(self._device), self._now_gib()

    def at_backward(self) -> None:
        """Note what is allocated when a backward begins, the most of a step's micro-batches."""
        if self._begun:
            self._backward = max(self._backward, torch.cuda.memory_allocated(self._device))
            self._forward_peak = max(self._forward_peak, torch.cuda.max_memory_allocated(self._device))

    def end(self, rounding: float | None) -> StepMemory:
        """Count the tensors, each once, and the peak; without ``rounding`` the peak is not known."""
        held = StepMemory(
            weights_gib=gib((*self.model.parameters(), *self.model.buffers()), self._device),
            optimizer_gib=gib(tensors(self.optimizer.state), self._device),
            gradients_gib=self._gradients_gib,
        )
        begun, self._begun = self._begun, None
        if begun is None or rounding is None:
            return held
        allocated, kept_gib = begun
        batch_gib = gib(tensors(self._batch), self._device)
        own_gib = held.optimizer_gib + kept_gib + batch_gib + self._apart_gib - allocated / 2**30
        own_gib += (1.0 + rounding) * held.weights_gib
        return replace(
            held,
            peak_gib=own_gib + torch.cuda.max_memory_allocated(self._device) / 2**30,
            backward_gib=own_gib + self._backward / 2**30 if self._backward else None,
            forward_peak_gib=own_gib + self._forward_peak / 2**30 if self._backward else None,
        )


def held_apart(job: Job, device: torch.device) -> float:
    """Count the GiB that a process which only loaded a job holds apart from its model, optimizer and batch.

    A frozen reference of a ``training_step``, say: 1.8 of 15.8 GiB were missing (DPO of a 1B, H200).
    """
    if device.type != "cuda":
        return 0.0
    torch_private.clear_cublas_workspaces()
    weights = (*job.model.parameters(), *job.model.buffers())
    gradients = (each.grad for each in weights if each.grad is not None)
    known = (*weights, *gradients, *tensors(getattr(job.optimizer, "state", {})), *tensors(job.batch))
    known_gib = gib(known, device) + rounding(job.model, device) * gib(weights, device)
    return max(0.0, torch.cuda.memory_allocated(device) / 2**30 - known_gib)


def rounding(model: nn.Module, device: torch.device) -> float:
    """Return the share by which tensors on the GPU take more than they hold: torch's allocator rounds up.

    0 on a CPU, and if not all weights are on the GPU: a single number alone takes 128 times what it holds.
    """
    weights = list(model.parameters())
    if device.type != "cuda" or gib(weights, device) < gib(weights, None):
        return 0.0
    counted = torch.cuda.memory_stats(device)
    holds, takes = (counted.get(f"{which}_bytes.all.current", 0) for which in ("requested", "allocated"))
    return max(0.0, takes / holds - 1.0) if holds else 0.0


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


def gpu_gib(device: torch.device) -> float | None:
    """Count what this process has and can have of the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / 2**30


def is_roomy(root: nn.Module, device: torch.device) -> bool:
    """Return whether all weights and gradients take a small part of the GPU's memory."""
    if device.type != "cuda":
        return False
    weights = [*root.parameters(), *root.buffers()]
    taken = gib(weights, None) + gib([each for each in weights if each.requires_grad], None)
    return taken * 2**30 <= ROOMY * torch.cuda.mem_get_info(device)[1]


def full_peak(plan: Plan, steps: Sequence[StepMemory]) -> float | None:
    """Extrapolate the peak to full depth in GiB, and never below what a step holds at least.

    None if a depth is missing, and on a CPU. The peak moves with the depth: few blocks have it at the end of
    the backward, many at its beginning, so the line through two depths may be too low (17.5 GiB instead of
    21.4, H200). The memory at the beginning is a straight line, to which the backward adds the same.
    """
    known = [each.peak_gib for each in steps if each.peak_gib is not None]
    if len(known) < len(plan.cuts):
        return None
    least = max(plan.full(known), plan.full([each.least_gib for each in steps]))
    before = [each.backward_gib for each in steps if each.backward_gib is not None]
    until = [each.forward_peak_gib for each in steps if each.forward_peak_gib is not None]
    if plan.whole or len(before) < len(plan.cuts):
        return least
    added = min(peak - begun for peak, begun in zip(known, before, strict=True))
    return max(least, plan.full(until), plan.full(before) + added)


def memory_parts(plan: Plan, peak_gib: float | None, steps: Sequence[StepMemory]) -> MemoryParts | None:
    """Divide the peak at full depth; None if a peak or the gradients are not known."""
    gradients = [each.gradients_gib for each in steps if each.gradients_gib is not None]
    if peak_gib is None or len(gradients) < len(plan.cuts):
        return None

    return MemoryParts(
        weights_gib=plan.full([each.weights_gib for each in steps]),
        gradients_gib=plan.full(gradients),
        optimizer_gib=plan.full([each.optimizer_gib for each in steps]),
        activations_gib=peak_gib - plan.full([each.least_gib for each in steps]),
    )
