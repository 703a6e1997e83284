"""Conduct a trial: build the variants by importance, time them, and prove them.

When time runs out, the last variants are dropped: first explorations, then single treatments, and so on. A
variant that fails (out of memory, a compile error) costs itself and nothing else. A variant without proof
that it ran as its name says has a reason instead of a number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch
from torch.utils.checkpoint import CheckpointError

from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.facts import Trial
from fp8doctor.facts.arm_names import ArmName, Reason, is_in_bf16
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.loading.job import Job
from fp8doctor.stacks import torch_private
from fp8doctor.stages import Stage
from fp8doctor.trial.copies.replica import NotReplicable, OriginalTouched
from fp8doctor.trial.measure.attempt import Attempt, Samples, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.memory_fit import beyond_gpu, gpu_gib, not_fitting, room_gib
from fp8doctor.trial.measure.profile_step import Tracer
from fp8doctor.trial.measure.results import report
from fp8doctor.trial.measure.rounds import time_in_turn
from fp8doctor.trial.measure.trial_run import DeviceLost, TrialRun, gpu_name, still_there
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.snapshot import CONTEXT, ProcessSnapshot, free, with_harm
from fp8doctor.trial.variant import VariantPlan, explores
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")


def left_alone(job: Job, run: TrialRun, work: Callable[[TrialRun], Trial]) -> Trial:
    """Do the work of a trial under a guard, put back what it changed, and name what remains changed.

    Raises `DeviceLost` if a variant crashed the CUDA context: a new process can go on without it.
    """
    run.progress("noting the state of the model", None)
    began = time.monotonic()
    kept, guard = ProcessSnapshot(job), Guard(job)
    before = guard.sums()
    run = replace(run, budget=replace(run.budget, noted_s=time.monotonic() - began))
    with kept, kept as changed, guard.standing():
        trial = work(replace(run, guard=guard))
        run.keep(trial)
        run.progress("looking at what was changed", None)
    try:
        still_there(run.device, "")
    except DeviceLost:
        return with_harm(trial, (*changed, CONTEXT))
    return with_harm(trial, (*changed, *guard.changed(before)))


def timed(job: Job, lists: Sequence[str], plans: Sequence[VariantPlan], run: TrialRun) -> Trial:
    """Time the variants; the caller restores what they changed.

    ``lists`` names the lists of repeated blocks. A model that cannot be copied, or whose own step raises,
    gives a trial with a reason and no times.
    """
    if job.batch is None:
        reason = "there is no batch to run it on; give one, as example_batch() in a model file"
        return without_times(run, NoNumber(Reason.NO_BATCH, reason))
    run.begin(Stage.BUILDING)
    run.progress("copying the model to the device", None)
    attempts = [Attempt(plan, no_number=run.skipped(plan.name)) for plan in plans]
    bench = _bench(job, lists, run)
    if isinstance(bench, NoNumber):
        free(run.device)
        return msgspec.structs.replace(without_times(run, bench), elapsed_s=run.budget.elapsed_s)
    try:
        trial = _of_variants(attempts, Tracer(bench, run))
    except OriginalTouched as error:
        trial = without_times(run, raised(error))
    except Exception as error:
        _log.debug("the timing was stopped", exc_info=True)
        still_there(run.device, bench.at_work)
        reason = f"a variant that had run before stopped the timing with {sentence(error)}"
        trial = without_times(run, NoNumber(Reason.TIMING_RAISES, reason))
    finally:
        attempts.clear()
        if run.own_process:
            torch_private.forget_cuda_graphs()  # with the compiled code that recorded them
        bench.close()
    return msgspec.structs.replace(trial, elapsed_s=run.budget.elapsed_s)


def _bench(job: Job, lists: Sequence[str], run: TrialRun) -> Bench | NoNumber:
    """Make the bench, or return why there is none."""
    try:
        return Bench(job, lists, run.device, interrupts=run.own_process, guard=run.guard)
    except (NotReplicable, OriginalTouched) as error:
        return NoNumber(Reason.NOT_REPLICABLE, str(error))
    except torch.OutOfMemoryError:
        return NoNumber(
            Reason.OUT_OF_MEMORY, "the memory of the GPU is too small for even a cut of the model"
        )
    except Exception as error:
        _log.debug("the step raises", exc_info=True)
        why = Reason.RECOMPUTE_DIFFERS if isinstance(error, CheckpointError) else Reason.STEP_RAISES
        return NoNumber(why, f"the training step raises {sentence(error)}")


def _of_variants(attempts: list[Attempt], tracer: Tracer) -> Trial:
    """Build, time and prove the variants."""
    bench, run = tracer.bench, tracer.run
    _build(bench, attempts, run)
    enough_s = run.budget.enough_s(attempts)
    run.begin(Stage.TIMING)
    samples = _samples(attempts, tracer)
    timed = [attempt for attempt in attempts if attempt.no_number is None]
    run.begin(Stage.PROFILING)
    run.keep(report(tracer, attempts, samples, enough_s))
    tracer.explain(timed, samples)
    run.keep(report(tracer, attempts, samples, enough_s))
    for attempt in timed:
        if not attempt.no_number and not attempt.proof and attempt.plan.name != ArmName.SELF_CHECK:
            run.progress(f"checking what {variant_in_a_sentence(attempt.plan.name)} ran", attempt.plan.name)
            tracer.prove(attempt, explain=False)
    return report(tracer, attempts, samples, enough_s)


def _samples(attempts: Sequence[Attempt], tracer: Tracer) -> Samples:
    """Time the variants in turn, and begin again without one that raises.

    If the step as it is raises, no variant has a time.
    """
    bench, run = tracer.bench, tracer.run
    while True:
        timed = [attempt for attempt in attempts if attempt.no_number is None]
        run.progress(f"timing {len(timed)} variants of the step", None)
        try:
            return time_in_turn(tracer, timed)
        except Exception as error:
            failed = next((each for each in timed if each.plan.name == bench.at_work), None)
            if failed is None or failed.plan.name == ArmName.AS_IS or bench.guard.written is not None:
                raise
            _log.debug("timing %s raises", failed.plan.name, exc_info=True)
            still_there(run.device, failed.plan.name)
            bench.drop(failed, raised(error))


def _build(bench: Bench, attempts: list[Attempt], run: TrialRun) -> None:
    """Build the step as it is, and each variant that is not skipped and has time left.

    If the step as it is has too little memory, all begins again with shallower models.
    """
    for attempt in attempts:
        _build_variant(attempt, bench, attempts, run)
        if attempt.plan.name == ArmName.AS_IS:
            while attempt.why is Reason.OUT_OF_MEMORY and bench.begin_shallower():
                attempt.no_number = None
                _build_variant(attempt, bench, attempts, run)


def _build_variant(attempt: Attempt, bench: Bench, attempts: Sequence[Attempt], run: TrialRun) -> None:
    """Build a variant, or note why it is not built."""
    if attempt.no_number is None and attempt.plan.name != ArmName.AS_IS:
        attempt.no_number = (
            _no_base_for(attempt.plan, attempts)
            or run.budget.no_time_for(attempt.plan, attempts)
            or not_fitting(attempt.plan, attempts, room_gib(bench.device), bench.frees_gib())
        )
    if attempt.no_number is not None:
        return
    if attempt.plan.name == ArmName.SELF_CHECK and not any(
        each.plan.name == ArmName.BF16 and each.no_number is None for each in attempts
    ):
        attempt.plan = replace(attempts[0].plan, name=ArmName.SELF_CHECK)
    built = sum(bool(each.ready or each.no_number) for each in attempts)
    which = f"variant {built + 1} of {len(attempts)}"
    run.progress(f"building {variant_in_a_sentence(attempt.plan.name)}, {which}", attempt.plan.name)
    bench.build(attempt, run.budget.build_until(attempts))
    if beyond := beyond_gpu(attempt, attempts, bench.plan, gpu_gib(bench.device)):
        bench.drop(attempt, beyond)


def _no_base_for(plan: VariantPlan, attempts: Sequence[Attempt]) -> NoNumber | None:
    """Return the reason of an exploration, or of a BF16, whose base has no time."""
    base = next((each for each in attempts if each.plan.name == plan.base), None)
    if base is None or base.no_number is None or not (explores(plan) or is_in_bf16(plan.name)):
        return None
    words = variant_in_a_sentence(base.plan.name)
    return NoNumber(base.no_number.why, f"it changes {words}, which has no time")


def without_times(run: TrialRun, no_number: NoNumber) -> Trial:
    """Make a trial without times, with the reason."""
    return Trial(
        device=run.device.type,
        gpu=gpu_name(run.device),
        own_process=run.own_process,
        blocks={},
        arms=(),
        self_check_ratio=None,
        reliable=False,
        why=no_number.why,
        reason=no_number.sentence,
        budget_s=run.budget.seconds,
    )
