"""Describe a variant of the training step, and the plan that makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8doctor.facts.arm_names import is_in_bf16


@dataclass(frozen=True)
class Variant:
    """One variant of the training step: the model, and what a treatment may change."""

    model: nn.Module
    """A replica. It shares its parameters with the other variants unless a treatment replaces them."""
    batch: Any
    """On the device of the trial."""
    autocast: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around every forward and loss, inside the autocast, such as ``te.autocast``."""
    optimizer: Mapping[str, Any] | None = None
    """Optimizer settings that differ from the job's, such as ``fused``; None shares the optimizer."""
    step_as_compiled: bool = True
    """Whether a training step that the user compiled stays compiled."""


Change = Callable[[Variant], Variant]


def as_it_is(variant: Variant) -> Variant:
    """Leave the step untouched."""
    return variant


@dataclass(frozen=True)
class VariantPlan:
    """The plan of one variant: its name, how it is made, and what must be seen in it."""

    name: str
    make: Change
    treatments: tuple[str, ...] = ()
    """Treatments on top of its base; empty for a baseline or a mere measurement."""
    fp8: bool | None = None
    base: str | None = None
    """The variant that it changes; None if it changes none."""
    change: Change = as_it_is
    """The change on top of its base; ``make`` is that of the base, then this."""
    explored: bool = False
    """Whether no finding proposed it; it is dropped if time is short."""
    tokens_ratio: float = 1.0
    """Tokens of its step / tokens of the step as it is."""
    compiled: bool = False
    """Whether compiled regions must be seen in it."""
    by_block: bool = False
    """Whether it compiles single blocks instead of following the user's own marks."""


def explores(plan: VariantPlan) -> bool:
    """Return whether the variant may join the prescription though no finding asks."""
    return plan.explored and bool(plan.treatments) and not is_in_bf16(plan.name)
