"""Arms whose failure is planted, and a clock that only a step moves."""

import torch

from fp8doctor.trial.copies.step import Variant, VariantPlan
from tests.trial.decoder import Decoder


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
