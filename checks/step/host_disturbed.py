"""The host was busy while the step was timed

Looks at: the host while the variants were timed (what others used of its cores, what a
hypervisor or a quota took, how long a thread of the step waited for a core, and how evenly a
fixed piece of Python ran), and whether the step waits for the host at all (STP001). Where the
timing is too noisy to tell FP8, as it is or with all fixes, from its BF16, or a quiet host could
have them on another side of each other, it is enough that one of the two leaves the GPU idle for
more than 3 % of its step, in gaps that end with a launch that came late.

Why it costs time. A step that waits for its host is as long as its launches take. Other programs on
the same host make them up to 1.8 times as long, in some rounds more than in others. FP8, which
launches more kernels, loses the most. A step that waits now and then is longer in some rounds,
which is enough to hide, or to turn, which of two close steps is faster. Elsewhere the host's load
changes nothing, and this check is silent.

What to do. Time again when the host is quiet, or on cores that nobody else uses. Where the host
sets the pace the verdict of this trial is marked as unreliable. Where the steps at the best pace
that was seen of the host, or where that is not known their kernels alone, would tell another of
faster, even and slower, and a quarter of the rounds does, the verdict is that the timing does not
tell.

    top -b -n 1 | head -n 20   # before: who uses the cores; `st` is what the hypervisor takes
    fp8doctor model.py         # after: timed again

Evidence: in `h100-disturbed_host` FP8 takes 73.9 ms a step and BF16 70.7 ms, while Python ran up to
twice as long as at its best: neither is faster for sure. What is counted: `/proc/stat`, `schedstat`
of each thread, and the `cpu.stat` of a cgroup. https://docs.kernel.org/scheduler/sched-stats.html
https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu
"""

from __future__ import annotations

from fp8doctor.analysis.noise import host_bound_step, host_contention, step_moved_by_host
from fp8doctor.analysis.outcome import compared_pairs
from fp8doctor.analysis.step_difference import breakdown_of
from fp8doctor.analysis.treatment_table import QUIET_HOST
from fp8doctor.analysis.variant_words import variant_in_a_sentence
from fp8doctor.facts import Arm, Breakdown, Facts, HostLoad, Trial
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent


@check("STP009", "host-disturbed", area="step", severity="warning")
def host_disturbed(facts: Facts) -> Finding | NotApplicable | None:
    waiting = host_bound_step(facts.trial)
    moved = None if waiting else step_moved_by_host(facts.trial, compared_pairs(facts))
    if waiting is None and moved is None:
        return NotApplicable(reason="no step that was timed on a GPU waits for the host")
    load = facts.trial.host
    what = host_contention(load)
    if what is None:
        return None
    return Finding(
        title=f"The host was disturbed while {'it set the pace' if waiting else 'steps were timed'}: {what}",
        explanation=f"{late_launches(moved) if moved else waits(waiting)}, and was timed for "
        f"{load.window_s:.0f} s on one that was not its own. {verdict_may_turn(moved or waiting)}",
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
        treatment=Treatment(
            name=QUIET_HOST,
            summary="time again when the host is quiet",
            code="top -b -n 1 | head -n 20   # who uses the cores; `st` is what the hypervisor takes\n"
            "fp8doctor model.py   # again, when it is quiet",
        ),
    )


def waits(step: Arm | None) -> str:
    """Say which step waits for the host."""
    return f"{'The step' if step and step.name == ArmName.AS_IS else 'The BF16 step'} waits for the host"


def verdict_may_turn(step: Arm | None) -> str:
    """Say what the wait of a step makes of the verdict, or of the advice that another form of FP8 gives."""
    if step and step.name in BF16_BASELINES:
        return "This verdict may be another on a quiet host."
    fp8_loses = "Steps with more launches, as those in FP8, lose the most"
    what = "verdict" if step is None or step.name == ArmName.AS_IS else "advice"
    return f"{fp8_loses}: this {what} may be another on a quiet host."


def late_launches(step: Arm) -> str:
    """Say how a step that the answer hangs on waits for the host now and then."""
    found, name = breakdown_of(step), variant_in_a_sentence(step.name)
    assert found is not None
    return (
        f"What is faster hangs on how long the GPU waits in {name}: it is idle for {found.idle_ms:,.1f} of "
        f"{step.step_ms:,.1f} ms, and {percent(found.host_wait_pct or 0.0)} of its gaps end with a kernel "
        "that was launched too late. The step waits for the host now and then"
    )


def _beside(others_pct: float) -> Facts:
    """A small model that waits for its host; made up, in the proportions of an H200."""
    parts = Breakdown(
        families_ms={"gemm_fp8": 2.0, "pointwise": 1.4},
        idle_ms=2.5,
        host_wait_pct=95.0,
        busy_ms=3.4,
        reliable=True,
        kernels=900,
        unclassified_pct=0.0,
    )
    now = Arm(name=ArmName.AS_IS, tried=True, step_ms=5.9, rounds_ms=(5.9,) * 15, breakdown=parts)
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
    return Facts(trial=Trial(device="cuda", arms=(now,), host=load))


SICK = _beside(others_pct=94.0)
HEALTHY = _beside(others_pct=11.0)
