"""Profile the compared variants, prove that each ran as named, and turn attempts and samples into facts."""

import logging
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from fp8doctor.analysis.noise import disturbances
from fp8doctor.analysis.significance import CONFIDENCE, interval
from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.facts import NOT_RECORDED, Arm, ArmCut, Breakdown, Trial
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import BREAKDOWN, NoNumber, not_tried
from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.trial.copies.depth import Plan, cleaned
from fp8doctor.trial.measure import timer
from fp8doctor.trial.measure.attempt import Attempt, Samples, full_ms, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import still_there
from fp8doctor.trial.measure.evidence import StepProof, counted, profiled, proof_of, why_not_profiled
from fp8doctor.trial.measure.memory import memory_parts
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")


def explain(bench: Bench) -> None:
    """Profile and prove the compared variants; the next replaces one that is refuted."""
    while left := [each for each in compared(bench) if each.profiled is None]:
        left[0].profiled = ()
        prove(bench, left[0])


def compared(bench: Bench) -> list[Attempt]:
    """List the step as it is, the fastest BF16, and the fastest other FP8."""
    timed = [each for each in bench.timed if each.plan.name != ArmName.SELF_CHECK]
    as_is = [each for each in timed if each.plan.name == ArmName.AS_IS]
    # The conversions of a BF16 job have the fixes that help BF16 too.
    bf16 = (*BF16_BASELINES, *(() if any(each.plan.fp8 for each in as_is) else (ArmName.BF16_PRESCRIBED,)))
    in_bf16 = [each for each in timed if each.plan.name in bf16]
    in_fp8 = [each for each in timed if each.plan.fp8 and each not in as_is]
    return [
        min(group, key=lambda each: interval(full_ms(bench.plan, bench.samples, each.plan)).value)
        for group in (as_is, in_bf16, in_fp8)
        if group
    ]


def prove(bench: Bench, attempt: Attempt) -> None:
    """Prove by one step that the variant ran as named; of a compared one, profile a step at every depth."""
    bench.at_work = attempt.plan.name
    try:
        proof = None if attempt.profiled is None else _divided(bench, attempt)
        if proof is None or proof.fp8_gemms is None:
            proof = proof_of(attempt.ready[-1].step, bench.device)
    except Exception as error:
        if attempt.plan.name == ArmName.AS_IS:
            raise
        _log.debug("proving %s raises", attempt.plan.name, exc_info=True)
        bench.drop(attempt, raised(error))
    else:
        attempt.proof, attempt.no_number = proof, refuted(attempt, proof)


def _divided(bench: Bench, attempt: Attempt) -> StepProof | None:
    """Profile a step at every depth, the deepest first as the proof.

    If that fails, it costs the breakdown only.
    """
    proof: StepProof | None = None
    steps: list[ProfiledStep] = []
    failure = bench.run.skip.get(BREAKDOWN) or why_not_profiled()
    if failure is None and not bench.run.budget.profile_fits(attempt):
        failure = "the budget was used up before it"
    if failure is None:
        bench.run.teller.say(f"profiling {variant_in_a_sentence(attempt.plan.name)}", BREAKDOWN)
        try:
            for ready in reversed(attempt.ready):
                traced = profiled(ready.step, bench.device, to_divide=True)
                proof = proof or counted(traced, bench.device)
                steps.insert(0, step_of(traced, on_gpu=bench.device.type == "cuda"))
            attempt.profiled = tuple(steps)
        except Exception as error:
            _log.debug("profiling a step raises", exc_info=True)
            still_there(bench.device, BREAKDOWN)
            failure = f"profiling a step fails with {sentence(error)}"
    if failure is not None:
        bench.failures.append(failure)
    return proof


def refuted(attempt: Attempt, proof: StepProof) -> NoNumber | None:
    """Explain why the variant did not run as its name says; None if it did."""
    fp8, gemms = attempt.plan.fp8, proof.fp8_gemms
    if fp8 is True and gemms is None:
        unseen = "the profiler cannot be used here, and only it shows whether FP8 matmuls ran"
        return NoNumber(Reason.FP8_UNSEEN, unseen)
    if fp8 is True and not gemms:
        return NoNumber(Reason.NO_FP8_GEMM, "no FP8 matmul was seen in its step")
    if fp8 is False and gemms:
        return NoNumber(Reason.FP8_IN_BF16, f"{gemms} FP8 matmuls were seen in a BF16 step")
    if attempt.plan.compiled and proof.graphs_run == 0:
        return NoNumber(Reason.NOTHING_COMPILED, "nothing in it was compiled")
    if any(ready.frames_in_window for ready in attempt.ready):
        return NoNumber(Reason.STILL_COMPILING, "it was still compiling while it was timed")
    return None


MOST_SCALE = 1.15
"""Profiled kernel time / unprofiled step up to which the profile divides that step. A convention: one
recorded profile on an H200 had 1.09 (Llama with 8B widths, compiled FP8, torch 2.11)."""

MOST_CLIPPED = 0.05
"""Share of the busy time that the line through the depths may put below zero. A convention."""

NO_LINE = NoNumber(
    Reason.NO_TIME_LEFT, "its cuts were too noisy to extrapolate, and there was no time for more rounds"
)
"""Reason of a variant with a round that comes out at no time at all."""

UNSEEN = NoNumber(Reason.NO_TIME_LEFT, "the budget ran out before fp8doctor saw FP8 matmuls in it")
"""Reason of an FP8 variant if the trial ends between its rounds and its proof."""

MOST_GROUPS = 30
"""Kernels to keep, the longest first; unknown ones are kept in addition."""


def report(bench: Bench, enough_s: float | None) -> Trial:
    """Turn the attempts and their samples into facts; ``enough_s`` is a budget that those left out fit in."""
    plan, samples = bench.plan, bench.samples
    failed = {"trial.arms.breakdown": "; ".join(dict.fromkeys(bench.failures))} if bench.failures else {}
    trial = bench.run.trial(
        blocks={cleaned(stack.name): stack.count for stack in plan.stacks},
        arms=tuple(
            _arm(plan, each, samples) for each in bench.attempts if each.plan.name != ArmName.SELF_CHECK
        ),
        self_check_ratio=_self_check(bench.attempts, samples),
        health=bench.observer.health(),
        host=bench.observer.host(),
        gaps=failed,
        why=None,
        enough_s=enough_s,
        elapsed_s=bench.run.budget.elapsed_s,
    )
    doubts = [doubt] if (doubt := "; ".join(disturbances(trial).values())) else []
    rounds = min(map(len, samples.values()), default=timer.LEAST_ROUNDS)
    if rounds < timer.LEAST_ROUNDS:
        doubts.append(
            f"there was time for only {rounds} of the {timer.LEAST_ROUNDS} rounds that an interval of "
            f"{CONFIDENCE:.0%} confidence needs"
        )
    reason = "; ".join(doubts) or None
    return msgspec.structs.replace(trial, reliable=reason is None, reason=reason)


def _self_check(attempts: Sequence[Attempt], samples: Samples) -> float | None:
    """Return the time of what the self-check repeats / its own."""
    again = next((each.plan for each in attempts if each.plan.name == ArmName.SELF_CHECK), None)
    if again is None or not {(again.name, 0), (again.base, 0)} <= samples.keys():
        return None
    return interval(
        [a / b for a, b in zip(samples[str(again.base), 0], samples[again.name, 0], strict=True)]
    ).value


def _arm(plan: Plan, attempt: Attempt, samples: Samples) -> Arm:
    of = attempt.plan
    planned: dict[str, Any] = {"name": of.name, "treatments": of.treatments, "base": of.base}
    proof = attempt.proof
    unseen = UNSEEN if proof is None and of.fp8 and of.name != ArmName.AS_IS else None
    if no_number := attempt.no_number or unseen:
        return not_tried(no_number, **planned)
    full = full_ms(plan, samples, of)
    if min(full) <= 0:
        return not_tried(NO_LINE, **planned)
    cuts = (
        ArmCut(
            blocks={cleaned(name): count for name, count in cut.items()},
            step_ms=statistics.median(samples[of.name, number]),
            **{name: value for name, value in ready.compiled.items() if name != "graphs"},
        )
        for number, (cut, ready) in enumerate(zip(plan.cuts, attempt.ready, strict=True))
    )
    at, memory = interval(full), [ready.memory for ready in attempt.ready]
    non_finite = [ready.non_finite for ready in attempt.ready]
    found = tuple(dict.fromkeys(name for each in non_finite for name in each or ()))
    divided: Breakdown | None = None if attempt.profiled is None else NOT_RECORDED
    if attempt.profiled:
        divided = breakdown(plan, attempt.profiled, at.value)
    peak_gib = attempt.full_peak(plan)
    return Arm(
        **planned,
        tried=True,
        why=None,
        reason=None,
        step_ms=at.value,
        low_ms=at.low if len(full) > 1 else None,
        high_ms=at.high if len(full) > 1 else None,
        rounds_ms=tuple(full),
        peak_gib=peak_gib,
        cuts=tuple(cuts),
        breakdown=divided,
        memory=memory_parts(plan, peak_gib, memory),
        fp8_gemms=proof.fp8_gemms if proof else NOT_RECORDED,
        graphs_run=proof.graphs_run if proof and proof.graphs_run is not None else NOT_RECORDED,
        non_finite=None if not found and None in non_finite else found,
    )


def breakdown(plan: Plan, steps: Sequence[ProfiledStep], step_ms: float) -> Breakdown:
    """Divide the step at full depth into its parts, by a profiled step at each depth.

    ``step_ms`` is the unprofiled step at full depth. If a profiled step is longer, communication is shortened
    first: ranks are not equally fast under a profiler, and the early ones wait inside the kernels of the
    exchange.
    """
    names = list(dict.fromkeys(name for step in steps for name in step.families_ms))
    on_the_line = {name: plan.full([step.families_ms.get(name, 0.0) for step in steps]) for name in names}
    parts = {name: value for name, value in on_the_line.items() if value > 0}
    busy = max(0.0, plan.full([step.busy_ms for step in steps]))
    waited = min(busy - step_ms, parts.get("communication", 0.0)) if step_ms > 0 else 0.0
    if waited > 0:
        parts["communication"] -= waited
        busy -= waited
    clipped = -sum(value for value in on_the_line.values() if value < 0)
    scale = max(1.0, busy / step_ms) if step_ms > 0 else 1.0
    share = busy / (scale * sum(parts.values())) if parts else 0.0
    unclassified = max(0.0, plan.full([step.families_ms.get("unknown", 0.0) for step in steps]))
    idle = step_ms - busy / scale
    deepest = steps[-1]
    unknown = [group for group in deepest.groups[MOST_GROUPS:] if group.family == "unknown"]
    return Breakdown(
        families_ms={name: share * value for name, value in parts.items()},
        idle_ms=max(0.0, idle) if step_ms > 0 else idle,
        host_wait_pct=deepest.host_wait_pct,
        busy_ms=busy,
        scale=scale,
        reliable=0 < busy <= MOST_SCALE * step_ms and clipped <= MOST_CLIPPED * busy,
        kernels=max(0, round(plan.full([step.kernels for step in steps]))),
        unclassified_pct=min(100.0, 100 * unclassified / busy) if busy else 0.0,
        groups=(*deepest.groups[:MOST_GROUPS], *unknown[:MOST_GROUPS]),
    )
