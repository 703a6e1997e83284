"""The losses that a trial followed, as lines of a chart and in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Struct

from fp8doctor.analysis.losses import loss_in_words
from fp8doctor.facts import Facts, LossCurve
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import plural

WIDE, HIGH = 1000, 200
"""Units of the drawing."""

NAMES = {
    ArmName.BF16_DISTURBED: "BF16 with other last bits",
    ArmName.BF16: "BF16",
    ArmName.AS_IS: "FP8 as you run it",
}
"""Arms whose loss is followed, those that lie over the others last."""


class LossLine(Struct, frozen=True):
    """One curve."""

    name: str
    kind: str
    """Of its style."""
    parts: tuple[str, ...]
    """Points of each stretch of finite losses."""


class LossChart(Struct, frozen=True):
    """All curves over one axis."""

    title: str
    words: str
    """The curves for who cannot see them."""
    sentence: str
    """What they say."""
    lines: tuple[LossLine, ...]
    legend: tuple[tuple[str, str], ...]
    """Kind and name of each sort of curve that is drawn."""


def loss_chart(facts: Facts) -> LossChart | None:
    """Draw the losses; None where none was followed or none is finite."""
    curves = [curve for name in NAMES for curve in facts.trial.losses if curve.arm == name]
    finite = [loss for curve in curves for loss in curve.losses if loss is not None]
    if not finite:
        return None
    steps, low, high = max(len(curve.losses) for curve in curves), min(finite), max(finite)
    drawn = [
        LossLine(_name(curve), curve.arm, tuple(_stretches(curve.losses, steps, low, high)))
        for curve in curves
    ]
    return LossChart(
        title=f"Loss of {plural(steps, 'step')} on one batch, between {low:.4g} and {high:.4g}",
        sentence=loss_in_words(facts.trial) or "",
        words="; ".join(map(_in_words, curves)),
        lines=tuple(drawn),
        legend=tuple(dict.fromkeys((line.kind, line.name) for line in drawn)),
    )


def _name(curve: LossCurve) -> str:
    return NAMES[ArmName(curve.arm)]


def _stretches(losses: Sequence[float | None], steps: int, low: float, high: float) -> Iterator[str]:
    """Write the points, leaving a gap where a loss is not finite."""
    reach = (high / 2 - low / 2) or 1.0
    for known, of in groupby(enumerate(losses), lambda each: each[1] is not None):
        if known:
            yield " ".join(
                f"{WIDE * at / max(steps - 1, 1):.1f},{HIGH * (high / 2 - loss / 2) / reach:.1f}"
                for at, loss in of
                if loss is not None
            )


def _in_words(curve: LossCurve) -> str:
    finite = [loss for loss in curve.losses if loss is not None]
    lost = len(curve.losses) - len(finite)
    told = f"{finite[0]:.4g} to {finite[-1]:.4g}" if finite else "none is finite"
    return f"{_name(curve)}: {told}{f', {lost} not finite' if lost and finite else ''}"
