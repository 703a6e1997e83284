"""What is known not to fit into the GPU's memory: predicted from what was measured, before it is tried.

Every prediction is a least one. A plan of cuts takes at least its weights and gradients. An arm that saves no
memory takes at least what the step of its base takes, and more for more tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from fp8doctor.analysis.variant_words import variant_in_a_sentence
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.copies.depth import Cut, Plan
from fp8doctor.trial.measure.attempt import Attempt, Ready
from fp8doctor.trial.measure.memory import gib
from fp8doctor.trial.variant import ArmPlan

MARGIN = 0.1
"""Share of the free memory by which a prediction has to exceed it. A choice: measured memory was mostly 1 %
off a plain script's in 27 jobs, and the allocator cannot use every gap."""

SAVE_NO_MEMORY = frozenset({"larger-batch", "checkpointing-off", "cuda-graphs"})
"""Treatments after which a step takes no less memory."""

WORTH_FREEING = 0.01
"""Share of the free memory that the other arms have to hold, for a try without them to be worth its build. A
choice."""


def room_gib(device: torch.device) -> float | None:
    """Count what can still be taken: what is free, and what the allocator keeps unused; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device)) / 2**30 - taken_gib(device)


def taken_gib(device: torch.device) -> float:
    """Count what tensors take of this process's memory on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def exceeds(least_gib: float, room: float | None) -> bool:
    """Whether what is needed at the least is beyond doubt more than there is."""
    return room is not None and least_gib > (1.0 + MARGIN) * room


def laid_out_gib(root: nn.Module, plan: Plan) -> float:
    """Sum up the least that the cuts of a plan take: all their weights, and the gradients of the largest."""
    every = [_kept(root, cut) for cut in plan.cuts]
    trained = (gib([each for each in kept if each.requires_grad], None) for kept in every)
    return sum(gib(kept, None) for kept in every) + max(trained)


def _kept(root: nn.Module, cut: Cut) -> list[Tensor]:
    """List the weights and buffers of a cut."""
    dropped = {
        id(each)
        for name, count in cut.kept.items()
        for block in list(root.get_submodule(name).children())[count:]
        for each in chain(block.parameters(), block.buffers())
    }
    return [each for each in chain(root.parameters(), root.buffers()) if id(each) not in dropped]


def not_fitting(
    plan: ArmPlan, attempts: Sequence[Attempt], room: float | None, frees_gib: float
) -> NoNumber | None:
    """Tell why an arm that saves no memory is not tried; None where it may fit, and where nobody knows.

    ``frees_gib`` is what the other arms hold. What fits without them alone is left to a pair.
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
        return NoNumber(Reason.OUT_OF_MEMORY, "the GPU's memory is too small for it")
    return NoNumber(
        Reason.DOES_NOT_FIT,
        f"it was not tried: modelled from {words}, its step takes at least {least:.0f} GiB, "
        f"and the GPU has {room + frees_gib:.0f} GiB free",
    )


def step_gib(measured: Sequence[Ready], times: float) -> float | None:
    """Sum up the least that a step of so many times the tokens takes beside what lies there between two; None
    without a peak.

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
