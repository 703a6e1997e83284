"""Losses of two watched runs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.record import Record

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
        yield f"the loss of {names[bool(losses[0])]} was not recorded"


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
