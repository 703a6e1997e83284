"""Losses in FP8 and BF16: of the paired steps of a trial, and of two watched runs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from msgspec import Struct

from fp8doctor.facts import Facts, LossCurve, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.facts.record import Record

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
    """Mean distance of FP8 / of BF16 with other last bits; None if these change nothing."""
    is_far: bool
    """True if FP8 is further off than its rounding explains, and lacks much of the progress."""
    whole: bool
    """True if the whole model was trained, not a cut of it."""


def loss_gap(trial: Trial) -> LossGap | None:
    """Compare the curves; None without curves, or if a loss is not finite."""
    if not trial.get("losses"):
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
    """Return the first step, from 1, whose loss is finite in BF16 only; else None."""
    by_arm = {curve.arm: curve.losses for curve in trial.get("losses", ())}
    pairs = zip(by_arm.get(ArmName.AS_IS, ()), by_arm.get(ArmName.BF16, ()), strict=False)
    return next((step for step, (fp8, bf16) in enumerate(pairs, 1) if fp8 is None and bf16 is not None), None)


def misses_loss(trial: Trial) -> bool:
    """Return whether FP8 does not learn as BF16 does, or its loss is not finite."""
    gap = if_recorded(loss_gap, trial)
    return bool(gap and gap.is_far) or non_finite_from(trial) is not None


def loss_in_words(trial: Trial) -> str | None:
    """Say what the loss curves show, or why there are none; None if unimportant."""
    from_step = non_finite_from(trial)
    if from_step is not None:
        return f"FP8's loss is not finite from step {from_step} on; BF16's is, from the same weights."
    gap = loss_gap(trial)
    if gap is None:
        reason = trial.get("gaps", {}).get("trial.losses")
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
    """List the curves of one variant that are finite throughout."""
    of_arm = (curve.losses for curve in curves if curve.arm == arm)
    finite = (tuple(each for each in losses if each is not None) for losses in of_arm)
    lengths = {len(curve.losses) for curve in curves}
    return [each for each in finite if each and len(each) == max(lengths)]


def _apart(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))


Losses = dict[int, float | None]
"""Number of the optimizer's step, from 1 on -> its loss; None if that was not finite."""


class RunLosses(Record, frozen=True, kw_only=True):
    """The losses of two runs over the steps that both were watched in."""

    first_step: int
    last_step: int
    means: tuple[float | None, float | None]
    """Over these steps; None if one of them was not finite."""
    not_finite_from: tuple[int | None, int | None]
    """The first step whose loss was NaN or infinite; None if there was none."""
    basis: str = "measured"

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1


def run_losses(first: Facts, second: Facts) -> RunLosses | None:
    """Compare the losses of two runs; None if they have no watched step in common."""
    both = _losses(first) or {}, _losses(second) or {}
    common = sorted(both[0].keys() & both[1].keys())
    if not common:
        return None
    return RunLosses(
        first_step=common[0],
        last_step=common[-1],
        means=(_mean(both[0], common), _mean(both[1], common)),
        not_finite_from=(_not_finite(both[0], common), _not_finite(both[1], common)),
    )


def why_no_losses(first: Facts, second: Facts, names: tuple[str, str]) -> Iterator[str]:
    """Say why the losses of two watched scripts differ; nothing if neither has one."""
    losses = _losses(first), _losses(second)
    if losses[0] and losses[1]:
        if not losses[0].keys() & losses[1].keys():
            watched = " and ".join(
                f"{name} was watched from step {min(each)} to {max(each)}"
                for name, each in zip(names, losses, strict=True)
                if each
            )
            yield f"{watched}, so that no loss of the same step is known of both"
    elif losses[0] or losses[1]:
        name, facts = (names[0], first) if not losses[0] else (names[1], second)
        seen = recorded(facts, "observed.losses")
        yield f"the loss of {name} was not {'in the output of its model' if seen else 'recorded'}"


def _losses(facts: Facts) -> Losses | None:
    if not recorded(facts, "observed.losses") or not recorded(facts, "observed.warmup"):
        return None
    seen = facts.observed
    return dict(enumerate(seen.losses, seen.warmup + 1)) if seen.losses else None


def _mean(losses: Losses, steps: list[int]) -> float | None:
    known = [each for each in map(losses.__getitem__, steps) if each is not None]
    return fmean(known) if len(known) == len(steps) else None


def _not_finite(losses: Losses, steps: list[int]) -> int | None:
    return next((step for step in steps if losses[step] is None), None)
