"""A variant of the training step, and the plan of an arm: what makes the variant out of the step as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Variant:
    """One variant of the training step: the model and everything around it that a treatment may change."""

    model: nn.Module
    """A replica. Its parameters are those of the other arms unless a treatment has to replace them."""
    batch: Any
    """On the device of the trial."""
    autocast: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around every forward and loss, inside the autocast, such as ``te.autocast``."""
    optimizer: Mapping[str, Any] | None = None
    """Settings of the optimizer that differ from the job's, such as ``fused``; None shares the optimizer of
    the other arms."""
    step_as_compiled: bool = True
    """Whether a training step that the user compiled stays compiled."""


Change = Callable[[Variant], Variant]


def as_it_is(variant: Variant) -> Variant:
    """Leave the step untouched."""
    return variant


@dataclass(frozen=True)
class ArmPlan:
    """One arm: its name, what makes it from the step as it is, and what must be seen in it."""

    name: str
    make: Change
    treatments: tuple[str, ...] = ()
    """What it carries out on top of its base; empty for a baseline or a mere measurement."""
    layers: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)
    """Of each of those, the modules that it is for; empty where its name says it all."""
    fp8: bool | None = None
    base: str | None = None
    """The arm that it changes; None where it changes none."""
    change: Change = as_it_is
    """What it does on top of its base; ``make`` is that of the base, then this."""
    explored: bool = False
    """Whether the trial tries it unasked; it is dropped when time is short."""
    tokens_ratio: float = 1.0
    """Tokens of its step / tokens of the step as it is."""
    compiled: bool = False
    """Whether compiled regions must be seen in it."""
    by_block: bool = False
    """Whether it compiles single blocks, in place of the user's own marks."""
    if_host_bound: tuple[ArmPlan, ...] = ()
    """What is tried too where the host sets the pace of this arm."""


def explores(plan: ArmPlan) -> bool:
    """Whether the arm may become a part of the prescription unasked. A mere measurement may not, and needs no
    final window."""
    return plan.explored and bool(plan.treatments)
