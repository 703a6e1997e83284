"""How far FP8's loss is from BF16's after some paired steps, in multiples of what a last bit does to it."""

from __future__ import annotations

from statistics import fmean

from msgspec import Struct

from fp8doctor.facts import LossCurve, Trial, recorded
from fp8doctor.facts.arm_names import ArmName

COARSER = 16.0
"""Multiple of what a last bit does that FP8's rounding alone explains: E4M3 keeps four bits less of every
number than BF16, so that its last bit is 2^4 times as large."""

LOST = 0.1
"""Share of what BF16's loss came down by that is worth a warning when FP8 lacks it. A convention of this
tool."""


class LossGap(Struct, frozen=True):
    """Two losses after as many steps, and how far apart the curves are."""

    steps: int
    bf16: float
    fp8: float
    times: float | None
    """Mean distance of FP8 / of BF16 with other last bits; None where these change nothing."""
    is_far: bool
    """Whether FP8 is further off than its rounding explains, and lacks a good part of what was learned."""
    whole: bool
    """Whether the whole model was trained, not a cut of it."""


def loss_gap(trial: Trial) -> LossGap | None:
    """Compare the curves; None where there are none, or one has a loss that is not finite."""
    if not recorded(trial, "losses") or not trial.losses:
        return None
    curves = {name: _finite(trial.losses, name) for name in (ArmName.AS_IS, ArmName.BF16)}
    disturbed = _finite(trial.losses, ArmName.BF16_DISTURBED)
    if len(curves[ArmName.AS_IS]) != 1 or len(curves[ArmName.BF16]) != 1 or not disturbed:
        return None
    (fp8,), (bf16,) = curves[ArmName.AS_IS], curves[ArmName.BF16]
    noise, gap = fmean(_apart(each, bf16) for each in disturbed), _apart(fp8, bf16)
    times = gap / noise if noise else None
    lacks = abs(fp8[-1] - bf16[-1]) > LOST * abs(bf16[0] - bf16[-1])
    return LossGap(
        steps=len(bf16),
        bf16=bf16[-1],
        fp8=fp8[-1],
        times=times,
        is_far=lacks and times is not None and times > COARSER,
        whole=not trial.losses[0].blocks,
    )


def non_finite_from(trial: Trial) -> int | None:
    """Tell the first step whose loss is finite in BF16 and not in FP8, counted from 1; None without one."""
    by_arm = {curve.arm: curve.losses for curve in trial.losses} if recorded(trial, "losses") else {}
    pairs = zip(by_arm.get(ArmName.AS_IS, ()), by_arm.get(ArmName.BF16, ()), strict=False)
    return next((step for step, (fp8, bf16) in enumerate(pairs, 1) if fp8 is None and bf16 is not None), None)


def loss_in_words(trial: Trial) -> str | None:
    """Tell what the steps said, or why they were not taken; None where nothing is to be said."""
    from_step = non_finite_from(trial)
    if from_step is not None:
        return f"FP8's loss is not finite from step {from_step} on; BF16's is, from the same weights."
    gap = loss_gap(trial)
    if gap is None:
        reason = trial.gaps.get("trial.losses") if recorded(trial, "gaps") else None
        return f"The loss was not followed: {reason}." if reason else None
    apart = (
        "BF16 with other last bits has the very same"
        if gap.times is None
        else f"apart by {gap.times:.1f} times what a last bit of BF16 weights does"
    )
    of = "" if gap.whole else " of a cut of the model"
    far = " That is more than FP8's rounding explains: compare longer runs." if gap.is_far else ""
    return (
        f"Loss after {gap.steps} steps{of} on one batch, which they learn by heart: BF16 {gap.bf16:.4g}, "
        f"FP8 {gap.fp8:.4g}, {apart}.{far}"
    )


def _finite(curves: tuple[LossCurve, ...], arm: str) -> list[tuple[float, ...]]:
    """List the curves of one arm that are finite throughout."""
    of_arm = (curve.losses for curve in curves if curve.arm == arm)
    finite = (tuple(each for each in losses if each is not None) for losses in of_arm)
    lengths = {len(curve.losses) for curve in curves}
    return [each for each in finite if each and len(each) == max(lengths)]


def _apart(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))
