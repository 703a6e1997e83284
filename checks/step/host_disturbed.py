"""The host was busy while the step was timed

What it finds. Other programs, a hypervisor or a quota slowed the host down during the trial, and this can
change which of two steps is faster.

Why it matters. A step that waits for its host is as long as its launches take. Other programs on the same
host make launches up to 1.8 times as long, in some rounds more than in others. FP8 launches more kernels, so
it loses the most. Even a step that waits only now and then is longer in some rounds, enough to hide or turn
the result of two close steps.

Fix. Time again when the host is quiet, or on cores that nobody else uses.

    # before: who uses the cores; `st` is the hypervisor's share
    top -b -n 1 | head -n 20

    # after: time again
    fp8doctor model.py

When to ignore it. If the step does not wait for the host: then nothing is reported.

How it is detected, and limits. fp8doctor reads others' use of the cores, steal time, quotas, the threads'
wait for a core, and how evenly a fixed piece of Python ran. If the host sets the pace, the size of the
speedup is not sure. If the result is close, it is enough that one of the two steps leaves the GPU idle for
over 3% with late launches. If a quarter of the rounds contradicts the result at the host's best pace, there
is no verdict.

References. In `h100-disturbed_host` FP8 takes 73.9 ms/step and BF16 70.7 ms, while Python ran up to twice as
long as at its best. https://docs.kernel.org/scheduler/sched-stats.html
https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu
"""

from __future__ import annotations

from fp8doctor.analysis.noise import host_bound_step, host_contention, step_moved_by_host
from fp8doctor.analysis.outcome import compared_pairs, verdict_when_quiet
from fp8doctor.analysis.step_difference import breakdown_of
from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.facts import Arm, ArmName, Facts, HostLoad
from fp8doctor.facts.arm_names import BF16_BASELINES
from fp8doctor.facts.examples import example, profiled
from fp8doctor.finding import Finding, NotApplicable
from fp8doctor.registry import check
from fp8doctor.wording import capital, percent


@check("STP009", "host-disturbed", area="step", severity="warning")
def host_disturbed(facts: Facts) -> Finding | NotApplicable | None:
    waiting = host_bound_step(facts.trial)
    moved = None if waiting else step_moved_by_host(facts.trial, compared_pairs(facts))
    if waiting is None and moved is None:
        return NotApplicable(reason="no step timed on a GPU waits for the host")
    load = facts.trial.host
    what = host_contention(load)
    if what is None:
        return None
    return Finding(
        title="Other load slowed the host while "
        f"{'it limited the step' if waiting else 'steps were timed'}: {what}",
        explanation=f"{late_launches(moved) if moved else waits(waiting)}. The trial timed it for "
        f"{load.window_s:.0f} s on a host with other load. "
        + (verdict_may_turn(moved) if moved else f"{capital(verdict_when_quiet(facts))}."),
        evidence={
            "others_pct": load.others_pct,
            "steal_pct": load.steal_pct,
            "waited_pct": load.waited_pct,
            "throttled_pct": load.throttled_pct,
            "python_median_ms": load.pace_median_ms,
            "python_fastest_ms": load.pace_low_ms,
            "cores": load.cores,
            "window_s": load.window_s,
        },
    )


def waits(step: Arm | None) -> str:
    """Say which step waits for the host."""
    return f"{'The step' if step and step.name == ArmName.AS_IS else 'The BF16 step'} waits for the host"


def verdict_may_turn(step: Arm) -> str:
    """Say what a step's wait means for the verdict, or for the advice from another FP8 variant."""
    if step.name in BF16_BASELINES:
        return "This verdict may change on a quiet host."
    what = "verdict" if step.name == ArmName.AS_IS else "advice"
    return f"Steps with more launches, such as FP8's, lose the most: this {what} may change on a quiet host."


def late_launches(step: Arm) -> str:
    """Say how a step that decides the answer waits for the host now and then."""
    found, name = breakdown_of(step), variant_in_a_sentence(step.name)
    assert found is not None
    return (
        f"Which one is faster depends on how long the GPU waits in {name}: it is idle for "
        f"{found.idle_ms:,.1f} of {step.step_ms:,.1f} ms, and {percent(found.host_wait_pct or 0.0)} of its "
        "gaps end with a late launch. The step waits for the host now and then"
    )


def _shared(others_pct: float) -> Facts:
    """A small model that waits for its host; invented, with an H200's proportions."""
    families = {"gemm_fp8": 2.0, "pointwise": 1.4}
    now = profiled(ArmName.AS_IS, families, 2.5, host_wait_pct=95.0, unclassified_pct=0.0)
    load = HostLoad(
        window_s=12.0,
        cores=16,
        others_pct=others_pct,
        steal_pct=0.0,
        waited_pct=0.4,
        throttled_pct=None,
        pace_low_ms=0.30,
        pace_median_ms=0.31,
    )
    return example(device="cuda", arms=(now,), host=load)


SICK = _shared(others_pct=94.0)
HEALTHY = _shared(others_pct=11.0)
