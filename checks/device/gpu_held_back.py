"""The GPU was slowed down while it was timed

What it finds. The GPU ran with lower clocks, a lower power limit, other processes or a MIG slice.

Why it matters. A GPU that is too hot, or whose power supply asks it to slow down, halves its clocks. Other
processes on it leave less for your step. Both hit some rounds more than others, so the trial can no longer
compare FP8 with BF16. A power limit below the default is steady: it slows FP8 and BF16 alike.

Fix. Find the active reason and the temperature, end the other jobs, and reset the power limit.

    # before: the reasons, the temperature, the limits
    nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER

    # after: reset the default limit of this GPU, in W
    sudo nvidia-smi -i 0 -pl 700

When to ignore it. "software power cap" at the default limit is normal and not reported: heavy matmuls run any
large GPU at its limit. Clocks of 1455 to 1845 MHz are usual on an H200 with 1980.

How it is detected, and limits. fp8doctor reads NVML during the trial: reasons for lower clocks, power limit,
other processes and their use. Without a trial it looks once, and then reports only thermal slowdowns and
power brakes, because NVML also reports "hardware slowdown" while clocks change. If NVML does not say how much
others used, the finding is information.

References. https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8doctor.analysis.noise import TAKEN_PCT, gpu_contention
from fp8doctor.analysis.noise import slowdowns as slowed_while_timed
from fp8doctor.facts import Facts, Gpu, Health, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent

AT_REST = ("software thermal slowdown", "hardware thermal slowdown", "hardware power brake")
"""Slowdowns that one look is enough for: a hardware slowdown is also reported while clocks change."""

CLOCKS = (
    "sm_clock_low_mhz",
    "sm_clock_median_mhz",
    "sm_clock_high_mhz",
    "power_median_w",
    "temperature_high_c",
)
"""Facts about the GPU in the trial that the finding repeats."""


@check("GPU004", "gpu-held-back", area="device", severity="warning")
def gpu_held_back(facts: Facts) -> Finding | NotApplicable | None:
    gpu = the_gpu(facts)
    if gpu is None:
        return NotApplicable(reason="no GPU is visible")
    health = facts.get("trial.health")
    slowed, limit = slowdowns(gpu, health), power_limit(gpu, health)
    capped = (
        limit is not None
        and gpu.power_limit_default_w is not None
        and round(limit) < round(gpu.power_limit_default_w)
    )
    others, use = other_processes(health)
    shared = others > 0 and (use is None or use >= TAKEN_PCT)
    if not (slowed or capped or shared or gpu.mig):
        return None
    said = [
        f"{reason} ({percent(share)} of the time)" if share else reason for reason, share in slowed.items()
    ]
    said += (
        [f"a power limit of {limit:.0f} W, {gpu.power_limit_default_w:.0f} W by default"] if capped else []
    )
    said += [f"{others} other process{'es' if others > 1 else ''} on it"] if shared else []
    said += ["only a MIG slice"] if gpu.mig else []
    return Finding(
        severity=None if slowed or capped or (shared and use is not None) else "info",
        title=f"{gpu.name} runs with {', '.join(said)}",
        explanation=consequence(gpu_contention(health) is not None, bool(slowed), capped, shared),
        evidence={
            "gpu": gpu.name,
            **{f"{reason.replace(' ', '_')}_pct": share for reason, share in slowed.items()},
            "power_limit_w": limit,
            "power_limit_default_w": gpu.power_limit_default_w,
            "mig": gpu.mig,
            "other_processes": others,
            "other_use_pct": use,
            "sm_clock_max_mhz": present(gpu, "sm_clock_max_mhz"),
            **({name: present(health, name) for name in CLOCKS} if health else {}),
        },
        treatment=treatment(slowed, gpu.power_limit_default_w if capped else None, shared),
    )


def consequence(disturbed: bool, slowed: bool, capped: bool, shared: bool) -> str:
    """Say what it means for the step and for the times of the trial."""
    if disturbed:
        return "The times of this trial are unreliable: the slowdown hit some rounds more than others."
    if slowed:
        return "This was so before any timing: the step runs slower than this GPU could."
    if capped:
        return "The step runs slower than this GPU could, FP8 and BF16 alike: their comparison holds."
    if shared:
        return (
            "NVML does not say how much of the GPU they used. If they computed, the times of this trial are "
            "unreliable."
        )
    return "The times are the slice's, not the whole GPU's."


def the_gpu(facts: Facts) -> Gpu | None:
    """Find the GPU that was timed, by its name, else the first visible one."""
    visible = [gpu for gpu in facts.gpus if gpu.visible]
    timed = facts.get("trial.gpu")
    return next((gpu for gpu in visible if gpu.name == timed), visible[0] if visible else None)


def slowdowns(gpu: Gpu, health: Health | None) -> dict[str, float | None]:
    """List the reasons that count, each with its share of the samples, or None after a single look."""
    if health is not None and recorded(health, "throttled_pct"):
        return dict(slowed_while_timed(health))
    return dict.fromkeys(reason for reason in present(gpu, "throttle_reasons") or () if reason in AT_REST)


def power_limit(gpu: Gpu, health: Health | None) -> float | None:
    """Return the limit in force, W: during the trial, else when the GPU was examined."""
    limit: float | None = present(health, "power_limit_w") or gpu.power_limit_w
    return limit


def other_processes(health: Health | None) -> tuple[int, float | None]:
    """Count other processes on the GPU during the trial, and their highest use; None if NVML does not say."""
    return present(health, "other_processes") or 0, present(health, "other_use_pct")


def present(of: Gpu | Health | None, name: str) -> Any:
    """Return the fact, or None when it was not recorded."""
    return of.get(name) if of else None


def treatment(slowed: Mapping[str, float | None], default_w: float | None, shared: bool) -> Treatment | None:
    lines = (
        ["nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER   # the active reason and the temperature"]
        if slowed
        else []
    )
    lines += (
        [
            f"sudo nvidia-smi -i 0 -pl {default_w:.0f}   # nvidia-smi's index of this GPU, and its default "
            "limit"
        ]
        if default_w
        else []
    )
    lines += (
        ["nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv   # who else is on it"]
        if shared
        else []
    )
    return (
        Treatment(
            name="free-the-gpu", summary="restore the GPU's clocks, then time again", code="\n".join(lines)
        )
        if lines
        else None
    )


def _h200(**throttled_pct: float) -> Facts:
    gpu = Gpu(
        name="NVIDIA H200",
        visible=True,
        mig=False,
        power_limit_w=700.0,
        power_limit_default_w=700.0,
        throttle_reasons=(),
    )
    reasons = {reason.replace("_", " "): share for reason, share in throttled_pct.items()}
    health = Health(throttled_pct=reasons, power_limit_w=700.0, other_processes=0, other_use_pct=None)
    return example(gpus=(gpu,), device="cuda", gpu="NVIDIA H200", health=health)


SICK = _h200(software_power_cap=40.0, hardware_thermal_slowdown=35.0)
HEALTHY = _h200(software_power_cap=90.0)
