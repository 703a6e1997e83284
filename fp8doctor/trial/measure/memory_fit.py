"""Predict what does not fit into the GPU's memory.

Truncated models take at least their weights and gradients. A variant that saves no memory takes at least as
much as its base, and more for more tokens. A variant that was built truncated is judged by its peak at full
depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from fp8doctor.analysis.fp8_weights import USABLE
from fp8doctor.analysis.treatment_table import (
    CHECKPOINTING_OFF,
    LARGER_BATCH,
    variant_in_a_sentence,
)
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.peak_memory import gib
from fp8doctor.trial.variant import VariantPlan
from fp8doctor.wording import percent

MARGIN = 0.1
"""Share of the free memory by which a prediction has to exceed it. A choice: predictions were mostly 1% off
in 27 jobs, and the allocator cannot use every gap."""

ROOMY = 0.2
"""Most of the GPU's memory, as a share, that weights and gradients take of a deep model that is timed whole.
A choice: Adam's moments take as much again, and the user's own model and the activations need the rest."""

LEAVES = 0.4
"""Share of the GPU's memory that such a model's first step has to leave. A choice: other variants may take
more than the step as it is."""

SAVE_NO_MEMORY = frozenset({LARGER_BATCH, CHECKPOINTING_OFF})
"""Treatments that save no memory."""

ALIKE = 1.01
"""Peak / peak of the step as it is that counts as equal: extrapolated peaks were within 1%."""


def room_gib(device: torch.device) -> float | None:
    """Count the free memory, and what the allocator keeps unused; None on a CPU."""
    gib = gpu_gib(device)
    return None if gib is None else gib - taken_gib(device)


def gpu_gib(device: torch.device) -> float | None:
    """Count what this process has and can have of the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / 2**30


def whole_gib(device: torch.device) -> float | None:
    """Count all memory of the GPU; None on a CPU."""
    return torch.cuda.mem_get_info(device)[1] / 2**30 if device.type == "cuda" else None


def taken_gib(device: torch.device) -> float:
    """Count what this process's tensors take on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def exceeds(least_gib: float, room: float | None) -> bool:
    """Return whether the least that is needed is clearly more than there is."""
    return room is not None and least_gib > (1.0 + MARGIN) * room


def is_roomy(root: nn.Module, gpu_gib: float | None) -> bool:
    """Return whether all weights and gradients take a small part of the GPU's memory."""
    return gpu_gib is not None and laid_out_gib(root, Plan((), (Cut({}),))) <= ROOMY * gpu_gib


def start_peak(device: torch.device) -> None:
    """Reset the peak of the memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def leaves_room(device: torch.device) -> bool:
    """Return whether the peak since `start_peak` leaves enough of the GPU's memory."""
    whole = whole_gib(device)
    return whole is None or torch.cuda.max_memory_allocated(device) / 2**30 <= (1.0 - LEAVES) * whole


def laid_out_gib(root: nn.Module, plan: Plan) -> float:
    """Sum up the weights of a plan's models, and the gradients of the largest."""
    every = [_kept(root, cut) for cut in plan.cuts]
    trained = (gib([each for each in kept if each.requires_grad], None) for kept in every)
    return sum(gib(kept, None) for kept in every) + max(trained)


def _kept(root: nn.Module, cut: Cut) -> list[Tensor]:
    """List the weights and buffers of a truncated model."""
    dropped = {
        id(each)
        for name, count in cut.kept.items()
        for block in list(root.get_submodule(name).children())[count:]
        for each in chain(block.parameters(), block.buffers())
    }
    return [each for each in chain(root.parameters(), root.buffers()) if id(each) not in dropped]


def not_fitting(
    plan: VariantPlan, attempts: Sequence[Attempt], room: float | None, frees_gib: float
) -> NoNumber | None:
    """Explain why a variant that saves no memory is not tried; None if it may fit.

    ``frees_gib`` is what the other variants hold. A variant that fits only without them is out of memory.
    """
    base = next((each for each in attempts if each.plan.name == plan.base), None)
    if room is None or base is None or not plan.treatments or not SAVE_NO_MEMORY.issuperset(plan.treatments):
        return None
    words = variant_in_a_sentence(base.plan.name)
    if base.why is Reason.DOES_NOT_FIT:
        return NoNumber(Reason.DOES_NOT_FIT, f"it takes no less memory than {words}, which does not fit")
    least = step_gib(base.ready, plan.tokens_ratio / base.plan.tokens_ratio)
    if least is None or not exceeds(least, room):
        return None
    if not exceeds(least, room + frees_gib):
        return NoNumber(Reason.OUT_OF_MEMORY, "the GPU has too little memory left for it")
    return NoNumber(
        Reason.DOES_NOT_FIT,
        f"it was not tried: modelled from {words}, its step takes at least {least:.0f} GiB, "
        f"and the GPU has {room + frees_gib:.0f} GiB free",
    )


def step_gib(measured: Sequence[Ready], times: float) -> float | None:
    """Sum up the least that a step takes with so many times the tokens.

    Copies of the weights in another type do not grow with the tokens: as much as the weights is left out.
    """
    least = []
    for each in measured:
        if each.peak_gib is None:
            return None
        taken, held = each.peak_gib - each.held.static_gib, each.held
        grows = max(0.0, taken - (held.gradients_gib or 0.0) - held.weights_gib)
        least.append(taken + (times - 1.0) * grows)
    return max(least, default=None)


def beyond_gpu(
    attempt: Attempt, attempts: Sequence[Attempt], plan: Plan, gpu_gib: float | None
) -> NoNumber | None:
    """Explain why a truncated variant does not fit at full depth; None if it may.

    The most that it may take counts. A change, and BF16 without checkpointing, may fill the usable share of
    ``gpu_gib``, or take what the step as it is takes, which may run on more GPUs. Other BF16 may too.
    """
    as_is = next((each for each in attempts if each.plan.name == ArmName.AS_IS), None)
    if gpu_gib is None or as_is is None or attempt is as_is or plan.whole:
        return None
    now, own = as_is.full_peak(plan), attempt.full_peak(plan)
    if now is None or own is None:
        return None
    if attempt.plan.treatments or attempt.plan.name == ArmName.BF16_WITHOUT_CHECKPOINTING:
        fits, of = (
            own <= max(USABLE * gpu_gib, ALIKE * now),
            f", of which a step may fill {percent(100 * USABLE)}",
        )
    else:
        fits, of = attempt.plan.name not in BF16_BASELINES or own <= gpu_gib or now > gpu_gib, ""
    if fits:
        return None
    cuts = " and ".join(map(str, plan.cuts))
    return NoNumber(
        Reason.DOES_NOT_FIT,
        f"its step takes {own:.1f} GiB at full depth, modelled from cuts to {cuts} blocks, "
        f"and the GPU has {gpu_gib:.1f} GiB for it{of}",
    )
