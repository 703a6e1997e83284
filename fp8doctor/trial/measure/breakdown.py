"""Where an arm's step goes at full depth, from one profiled step at each cut."""

from __future__ import annotations

from collections.abc import Sequence

from fp8doctor.facts import Breakdown, KernelGroup
from fp8doctor.profiling.profiled_step import ProfiledStep
from fp8doctor.trial.copies.depth import Plan

MOST_SCALE = 1.15
"""Profiled kernel time / unprofiled step, above which the profile does not divide that step. A convention of
this tool: one arm of the recorded profiles on an H200 was busy for 1.09 of its step (Llama with 8B widths,
compiled FP8, torch 2.11)."""

MOST_CLIPPED = 0.05
"""Share of the busy time that the line through the cuts may put below zero. A convention of this tool."""

MOST_GROUPS, MOST_MODULES = 30, 40
"""Kernels and modules that are kept, the longest first; kernels that no rule knows are kept beside them."""


def breakdown(plan: Plan, steps: Sequence[ProfiledStep], step_ms: float, tokens_ratio: float) -> Breakdown:
    """Divide the step at full depth into its parts.

    ``steps`` are those of ``plan``'s cuts, ``step_ms`` is the unprofiled step at full depth for the tokens of
    the step as it is. What a profiled step is longer by is taken off the communication first: ranks are
    profiled unequally fast, and who is early waits inside the kernels of the exchange.
    """
    names = list(dict.fromkeys(name for step in steps for name in step.families_ms))
    on_the_line = {
        name: plan.full([step.families_ms.get(name, 0.0) for step in steps]) / tokens_ratio for name in names
    }
    parts = {name: value for name, value in on_the_line.items() if value > 0}
    busy = max(0.0, plan.full([step.busy_ms for step in steps]) / tokens_ratio)
    waited = min(busy - step_ms, parts.get("communication", 0.0)) if step_ms > 0 else 0.0
    if waited > 0:
        parts["communication"] -= waited
        busy -= waited
    clipped = -sum(value for value in on_the_line.values() if value < 0)
    scale = max(1.0, busy / step_ms) if step_ms > 0 else 1.0
    share = busy / (scale * sum(parts.values())) if parts else 0.0
    unclassified = max(0.0, plan.full([step.unclassified_ms for step in steps]) / tokens_ratio)
    idle = step_ms - busy / scale
    deepest = steps[-1]
    return Breakdown(
        families_ms={name: share * value for name, value in parts.items()},
        idle_ms=max(0.0, idle) if step_ms > 0 else idle,
        host_wait_pct=deepest.host_wait_pct,
        busy_ms=busy,
        scale=scale,
        reliable=0 < busy <= MOST_SCALE * step_ms and clipped <= MOST_CLIPPED * busy,
        kernels=max(0, round(plan.full([step.kernels for step in steps]))),
        unclassified_pct=min(100.0, 100 * unclassified / busy) if busy else 0.0,
        groups=_kept(deepest.groups),
        modules=deepest.modules[:MOST_MODULES],
    )


def _kept(groups: Sequence[KernelGroup]) -> tuple[KernelGroup, ...]:
    longest, rest = groups[:MOST_GROUPS], groups[MOST_GROUPS:]
    return (*longest, *[group for group in rest if group.family == "unknown"][:MOST_GROUPS])
