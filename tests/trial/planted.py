"""Arms whose gain or failure is planted, and a clock that only a step moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchao.float8 import convert_to_float8_training

from fp8doctor.loading.job import Job
from fp8doctor.trial.planning import chain
from fp8doctor.trial.variant import Variant, VariantPlan
from tests.trial.decoder import BF16, Decoder, job


class Clock:
    """A clock that only a step moves, so that no load of the machine is in a test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()
STEP_MS = 10.0


class Ticking(Decoder):
    """A model whose forward takes `STEP_MS` by that clock, times ``share``."""

    share = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        CLOCK.now_s += self.share * STEP_MS / 1e3
        return super().forward(tokens)


def faster(share: float) -> Callable[[Variant], Variant]:
    """A change that makes the step take ``share`` of its time."""

    def make(variant: Variant) -> Variant:
        model: Any = variant.model
        model.share = model.share * share
        return variant

    return make


PROPOSED = 0.9
"""Share of the step that the planted proposal leaves."""


def explored(
    name: str,
    change: Callable[[Variant], Variant],
    base: VariantPlan,
    treatments: tuple[str, ...] | None = None,
) -> VariantPlan:
    return VariantPlan(
        name,
        chain(base.make, change),
        (name,) if treatments is None else treatments,
        True,
        base.name,
        change,
        explored=True,
    )


def ticking() -> Job:
    return job(
        model=convert_to_float8_training(
            Ticking(1).bfloat16(), module_filter_fn=lambda layer, name: name != "head"
        )
    )


TICKING_BF16 = VariantPlan("bf16", chain(BF16.make, faster(0.5)), fp8=False)
PLANTED = VariantPlan("prescribed", faster(PROPOSED), ("proposal",), True, "as_is", faster(PROPOSED))


def failing(error: Exception) -> VariantPlan:
    def make(variant: Variant) -> Variant:
        raise error

    return VariantPlan("failing", make)


def worn(steps: int = 5) -> VariantPlan:
    """An arm that raises in the window, after so many steps."""

    def make(variant: Variant) -> Variant:
        forward, left = variant.model.forward, [steps]

        def ending(tokens: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            if not left[0]:
                raise RuntimeError("worn out")
            return forward(tokens)

        variant.model.forward = ending  # type: ignore[method-assign]
        return variant

    return VariantPlan("worn", make)
