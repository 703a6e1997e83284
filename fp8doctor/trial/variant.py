"""Describe a variant of the training step, and the plan that makes it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import nn


class Place(IntEnum):
    """The order in which variants are built. The first four decide; others have to fit into the budget."""

    AS_IS = 1
    OWN_BF16 = 2
    """BF16 in the user's own form of compilation; of a BF16 job that is the step as it is."""
    PLAN = 3
    """FP8 with the plan, and BF16 with what of it helps BF16 too; of a BF16 job its best conversion."""
    OTHER_BF16 = 4
    """BF16 compiled by block; BF16 once more, as a check; both compiled whole, if the host sets the pace."""
    NO_CHECKPOINTING = 5
    """Without checkpointing, BF16 and FP8, if more than half of the memory is free; else after all others."""
    REST = 6
    """Each fix alone, other recipes, and what no finding asked for."""

    @property
    def decides(self) -> bool:
        return self <= Place.OTHER_BF16


@dataclass(frozen=True)
class Variant:
    """What a treatment may change in one variant of the training step."""

    model: nn.Module
    """A replica. It shares its parameters with the other variants unless a treatment replaces them."""
    batch: Any
    """On the device of the trial."""
    autocast: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around every forward and loss, inside the autocast, such as ``te.autocast``."""
    throughout: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around the whole step, backward and update too, outside the autocast."""
    fused: bool = False
    """Whether its optimizer is fused, and not that of the job."""
    step_as_compiled: bool = True
    """Whether a training step that the user compiled stays compiled."""


Change = Callable[[Variant], Variant]


def as_it_is(variant: Variant) -> Variant:
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
    explored: bool = False
    """Whether no finding proposed it."""
    compiled: bool = False
    """Whether compiled regions must be seen in it."""
    by_block: bool = False
    """Whether it compiles single blocks instead of following the user's own marks."""
    place: Place = Place.REST
    if_host_waits: bool = False
    """Whether it is built only if the fastest compiled step waits for the host."""
