"""Profile the compared variants, and prove that every variant ran as named.

The deepest profile is the variant's proof too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fp8doctor.analysis.significance import interval
from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.profiling.profiled_step import ProfiledStep, step_of
from fp8doctor.trial.measure.attempt import Attempt, full_ms, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.evidence import StepProof, counted, profiled, proof_of, why_not_profiled
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

BREAKDOWN = "breakdown"
"""Name of the profiles in progress and ``skip``: if a process dies in one, the next runs without."""


def explain(bench: Bench, attempts: Sequence[Attempt]) -> None:
    """Profile and prove the compared variants; the next replaces one that is refuted."""
    while left := [each for each in compared(bench, attempts) if each.profiled is None]:
        left[0].profiled = ()
        prove(bench, left[0])


def compared(bench: Bench, attempts: Sequence[Attempt]) -> list[Attempt]:
    """List the step as it is, the fastest BF16, and the fastest other FP8."""
    timed = [each for each in attempts if each.no_number is None and each.plan.name != ArmName.SELF_CHECK]
    groups = (
        [each for each in timed if each.plan.name == ArmName.AS_IS],
        [each for each in timed if each.plan.name in BF16_BASELINES],
        [each for each in timed if each.plan.fp8 and each.plan.name != ArmName.AS_IS],
    )

    def median_ms(attempt: Attempt) -> float:
        return interval(full_ms(bench.plan, bench.samples, attempt.plan)).value

    return [min(group, key=median_ms) for group in groups if group]


def prove(bench: Bench, attempt: Attempt) -> None:
    """Prove by one step that the variant ran as named; of a compared one, profile a step at every depth.

    A failure of the profile costs the breakdown only.
    """
    bench.at_work = attempt.plan.name
    proof: StepProof | None = None
    try:
        if attempt.profiled is not None:
            why_no_parts = bench.run.skip.get(BREAKDOWN) or why_not_profiled()
            if why_no_parts is None and not bench.run.budget.profile_fits(attempt):
                why_no_parts = "the budget was used up before it"
            if why_no_parts is None:
                proof, why_no_parts = _divided(bench, attempt)
            bench.failures += [why_no_parts] if why_no_parts else []
        if proof is None or proof.fp8_gemms is None:
            proof = proof_of(attempt.ready[-1].step, bench.device)
    except Exception as error:
        if attempt.plan.name == ArmName.AS_IS:
            raise
        _log.debug("proving %s raises", attempt.plan.name, exc_info=True)
        bench.drop(attempt, raised(error))
    else:
        attempt.proof, attempt.no_number = proof, refuted(attempt, proof)


def _divided(bench: Bench, attempt: Attempt) -> tuple[StepProof | None, str | None]:
    """Profile a step at every depth, the deepest first as the proof; also return why that failed."""
    bench.run.teller.say(f"profiling {variant_in_a_sentence(attempt.plan.name)}", BREAKDOWN)
    proof: StepProof | None = None
    steps: list[ProfiledStep] = []
    try:
        for ready in reversed(attempt.ready):
            traced = profiled(ready.step, bench.device, to_divide=True)
            proof = proof or counted(traced, bench.device)
            steps.insert(0, step_of(traced, on_gpu=bench.device.type == "cuda"))
    except Exception as error:
        _log.debug("profiling a step raises", exc_info=True)
        still_there(bench.device, BREAKDOWN)
        return proof, f"profiling a step fails with {sentence(error)}"
    attempt.profiled = tuple(steps)
    return proof, None


def refuted(attempt: Attempt, proof: StepProof) -> NoNumber | None:
    """Explain why the variant did not run as its name says; None if it did."""
    if attempt.plan.fp8 is True and proof.fp8_gemms is None:
        return NoNumber(
            Reason.FP8_UNSEEN,
            "the profiler cannot be used here, and only it shows whether FP8 matmuls ran",
        )
    if attempt.plan.fp8 is True and not proof.fp8_gemms:
        return NoNumber(Reason.NO_FP8_GEMM, "no FP8 matmul was seen in its step")
    if attempt.plan.fp8 is False and proof.fp8_gemms:
        return NoNumber(Reason.FP8_IN_BF16, f"{proof.fp8_gemms} FP8 matmuls were seen in a BF16 step")
    if attempt.plan.compiled and proof.graphs_run == 0:
        return NoNumber(Reason.NOTHING_COMPILED, "nothing in it was compiled")
    if any(ready.frames_in_window for ready in attempt.ready):
        return NoNumber(Reason.STILL_COMPILING, "it was still compiling while it was timed")
    return None
