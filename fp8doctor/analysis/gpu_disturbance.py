"""What NVML saw that makes the times of a trial unreliable: heat, failing power, others on the GPU."""

from __future__ import annotations

from fp8doctor.analysis.significance import EVEN
from fp8doctor.facts import Health, recorded

SLOWDOWNS = (
    "hardware slowdown",
    "software thermal slowdown",
    "hardware thermal slowdown",
    "hardware power brake",
)
"""Reasons that mean heat or a failing supply of power. Source: NVML API reference, nvmlClocksEventReasons.
Reaching the default power limit, a voltage limit or clocks that the owner set himself are the ordinary state
of a GPU at work."""

SLOWED_PCT = 10.0
"""Share of the samples, in per cent, from which a reason counts. A convention of this tool: NVML reports a
slowdown while clocks change, and a median over rounds stands a few."""

SHARED_PCT = 100 * EVEN
"""Use of the GPU by others, in per cent, that can move a verdict: what this tool calls even."""


def slowdowns(health: Health) -> dict[str, float]:
    """List the reasons that count, with their share of the samples in per cent."""
    throttled = health.throttled_pct if recorded(health, "throttled_pct") else {}
    return {
        reason: share for reason, share in throttled.items() if reason in SLOWDOWNS and share >= SLOWED_PCT
    }


def disturbance(health: Health | None) -> str | None:
    """Tell what hit some rounds of the trial more than others; None when NVML saw nothing."""
    if health is None:
        return None
    said = [f"{reason} in {share:.0f} % of the samples" for reason, share in slowdowns(health).items()]
    if (
        recorded(health, "other_use_pct")
        and health.other_use_pct is not None
        and health.other_use_pct >= SHARED_PCT
    ):
        said.append(f"other processes used up to {health.other_use_pct:.0f} % of the GPU")
    return ", ".join(said) or None
