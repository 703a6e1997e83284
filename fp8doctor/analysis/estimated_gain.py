"""Step now, best BF16 and step with a plan, estimated from the same intervals."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.analysis.modelled_speedup import ModelledSpeedup
from fp8doctor.finding import Saving

GAIN = 0.01
"""Gain of a modelled step, from which the plan changes what the cost model knows. A choice."""


class EstimatedGain(Struct, frozen=True):
    """Step now and with a plan, in ms: the one less the other is the saving."""

    now_ms: float
    """As it ran, else as modelled."""
    bf16_ms: float
    after_ms: float
    low_ms: float
    """The least that the step with the plan takes: `bf16_ms` / the upper end of its ratio to BF16."""
    high_ms: float
    gpu: str
    may_keep_ms: float
    """Time that the model does not explain, and that the step with the plan may have too."""

    @property
    def faster(self) -> tuple[float, float]:
        """How many times faster than now: both ends if more than the model's error is between them."""
        point = self.now_ms / self.after_ms
        return (self.now_ms / self.high_ms, self.now_ms / self.low_ms) if self.may_keep_ms else (point, point)

    @property
    def saving(self) -> Saving:
        ends = self.now_ms - self.high_ms, self.now_ms - self.low_ms
        return Saving(low=ends[0], high=ends[1], basis="modelled", gpu=self.gpu)


def estimated_gain(now: ModelledSpeedup, planned: ModelledSpeedup | None) -> EstimatedGain | None:
    """Estimate the step with the plan, or in the best BF16 if ``planned`` is None.

    None if the step now is unknown, or if the plan gains nothing that the model knows. A plan stays in BF16
    only if FP8 is not faster, so BF16 takes at most as long as now.
    """
    if not now.now or now.now_bounds is None or now.parts is None:
        return None
    bf16_ms = now.parts.bf16_ms
    now_ms = now.ran_ms or bf16_ms / now.now
    if planned is None:
        low, high = now.now_bounds
        ends = bf16_ms, now_ms * low, now_ms * min(high, 1.0)
        left_ms = now.left_out_ms
    elif planned.best / now.now - 1 < GAIN:
        return None
    else:
        low, high = planned.best_bounds
        left_ms = planned.left_out_ms
        ends = bf16_ms / planned.best, bf16_ms / high, (bf16_ms + left_ms) / low
    return EstimatedGain(now_ms, bf16_ms, *ends, now.gpu, left_ms)
