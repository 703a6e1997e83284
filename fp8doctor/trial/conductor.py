"""Conduct a trial: watch a forward, build the variants by importance, time and prove them."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from msgspec import structs
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.checkpoint import CheckpointError

from fp8doctor.analysis.treatment_table import variant_in_a_sentence
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, Trial
from fp8doctor.facts.arm_names import ArmName, Reason, is_in_bf16
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.loading.job import Job
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.looking import is_a, is_torchscript, modules_of, tensors_of
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.stages import Doing, Stage, Teller
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.copies.step import Place, VariantPlan
from fp8doctor.trial.copies.unsharded import unsharded
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.seen_calls import without_forward
from fp8doctor.trial.measure.attempt import Attempt, Ready, beyond_gpu, raised
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.budget import Budget, DeviceLost, TrialRun, choose_device, still_there
from fp8doctor.trial.measure.evidence import detached_at_the_end
from fp8doctor.trial.measure.memory import gpu_gib, held_apart
from fp8doctor.trial.measure.results import explain, prove, report
from fp8doctor.trial.measure.timer import interleave, sign_is_open
from fp8doctor.trial.planning import plan_variants
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.settings import CONTEXT, free, restored, trial_modes, with_harm
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

MOSTLY_FREE = 0.5
"""Share of the GPU's memory up to which a step with checkpointing may have more to gain without."""


def time_copies(
    job: Job,
    facts: Facts,
    device: str | None,
    propose: Callable[[Facts], Sequence[Step]],
    budget: Budget,
    tell: Callable[[Doing, str | None], object],
    *,
    keep: Callable[[Facts], object] = lambda known: None,
    **settings: Any,
) -> Facts | None:
    """Watch a forward of a copy, then time the variants; add that to the facts.

    None if there is no device for it. What the model raises becomes a reason. ``propose`` receives the facts
    with what the forward showed, and returns the steps to time. ``tell`` receives each activity and its
    variant, ``keep`` the facts with the trial so far. ``settings`` are other fields of the `TrialRun`.

    Raises `DeviceLost` in a process of the trial's own, and `UserError` for a device that is not here.
    """
    where = choose_device(device)
    if where is None:
        return None
    latest: list[Trial] = []

    def known(trial: Trial) -> Facts:
        latest[:] = [trial]
        return structs.replace(facts, trial=trial)

    teller = Teller(tell, budget.end)
    run = TrialRun(where, budget, teller, keep=lambda trial: keep(known(trial)), **settings)
    try:
        _refuse_unready(job)
        job = unsharded(job)
    except NotReplicable as error:
        facts = without_forward(facts, str(error))
        return known(run.without_times(NoNumber(Reason.NOT_REPLICABLE, str(error))))
    no_time = budget.left_out(Reason.NO_TIME_LEFT)
    run.keep(run.without_times(no_time))  # of a child that is ended from here on
    teller.begin(Stage.FORWARD)
    current = torch.cuda.device(where) if where.type == "cuda" else nullcontext()
    try:
        with current, left_alone(job, run) as changed:  # events are of the current device
            facts = rows.watch_copy(job, facts, run)
            planned = plan_variants(known(run.trial()), propose(facts), job)
            run.keep(run.without_times(no_time))
            trial = timed(job, [blocks.name for blocks in facts.network.blocks], planned, run)
            run.keep(trial)
    except DeviceLost as lost:
        if run.own_process:
            raise
        if not any(arm.tried for arm in latest[0].get("arms", ())):
            lost_it = NoNumber(Reason.TOOK_PROCESS_DOWN, f"{lost.arm}: {lost}")
            known(run.without_times(lost_it))
        return known(with_harm(latest[0], (CONTEXT,)))
    return known(with_harm(trial, changed))


def _refuse_unready(job: Job) -> None:
    """Raise `NotReplicable` for a part of ``torch.jit``, or a lazy module that has not run yet."""
    for name, module in modules_of(job.model):
        if is_torchscript(type(module)):
            raise NotReplicable(
                f"its part {name or type(module).__name__} is compiled by torch.jit, which takes no hooks "
                "and no FP8 layers: give fp8doctor the model without torch.jit"
            )
    for name, tensor in chain(tensors_of(job.model, "_parameters"), tensors_of(job.model, "_buffers")):
        if is_a(tensor, UninitializedParameter) or is_a(tensor, UninitializedBuffer):
            raise NotReplicable(
                f"its parameter {name} has no size before a batch has gone through the lazy module that "
                "holds it: run the model once on a batch, as in build_model(), before fp8doctor looks at it"
            )


@contextmanager
def left_alone(job: Job, run: TrialRun) -> Iterator[list[str]]:
    """Guard the model; in the user's process all that is theirs, put back at the end. Yield what changed."""
    alone = replace(job, loss=None, training_step=None, optimizer=None, other_optimizers=())
    guard = run.guard = Guard(alone if run.own_process else job)
    if run.own_process:
        run.apart_gib = held_apart(job, run.device)
        with trial_modes(), guard.standing():
            yield []
        return
    run.teller.say("noting the state of the model", None)
    before = guard.sums()
    with restored(job, guard) as changed:
        yield changed
        run.teller.say("looking at what was changed", None)
    still_there(run.device, "the trial")
    changed += guard.changed(before)


def timed(job: Job, lists: Sequence[str], plans: Sequence[VariantPlan], run: TrialRun) -> Trial:
    """Time the variants; ``lists`` names the lists of repeated blocks."""
    if job.batch is None:
        reason = "there is no batch to run it on; give one, as example_batch() in a model file"
        return run.without_times(NoNumber(Reason.NO_BATCH, reason))
    run.teller.begin(Stage.BUILDING)
    run.teller.say("copying the model to the device", None)
    bench = None
    try:
        skipped = {each: NoNumber(Reason.TOOK_PROCESS_DOWN, reason) for each, reason in run.skip.items()}
        attempts = [Attempt(each, no_number=skipped.get(each.name)) for each in plans]
        bench = Bench(job, lists, run, attempts)
        trial = _timed(bench)
    except NotReplicable as error:
        trial = run.without_times(NoNumber(Reason.NOT_REPLICABLE, str(error)))
    except Exception as error:
        _log.debug("the step raises", exc_info=True)
        if bench is not None:
            still_there(run.device, bench.at_work)
        trial = run.without_times(_why_none(error, ran=bench is not None))
    finally:
        if run.own_process:
            torch_private.forget_cuda_graphs()  # with the compiled code that recorded them
        free(run.device) if bench is None else bench.close()
    return structs.replace(trial, elapsed_s=run.budget.elapsed_s)


def _why_none(error: Exception, *, ran: bool) -> NoNumber:
    """Explain why no variant has a time; ``ran`` says whether the step as it is did."""
    if ran:
        reason = f"a variant that had run before stopped the timing with {sentence(error)}"
        return NoNumber(Reason.TIMING_RAISES, reason)
    if isinstance(error, torch.OutOfMemoryError):
        reason = "the memory of the GPU is too small for even a cut of the model"
        return NoNumber(Reason.OUT_OF_MEMORY, reason)
    why = Reason.RECOMPUTE_DIFFERS if isinstance(error, CheckpointError) else Reason.STEP_RAISES
    return NoNumber(why, f"the training step raises {sentence(error)}")


def _timed(bench: Bench) -> Trial:
    run = bench.run
    build(bench)
    enough_s = run.budget.enough_s(bench.attempts)
    run.teller.begin(Stage.TIMING)
    _take_samples(bench)
    run.teller.begin(Stage.PROFILING)
    run.keep(report(bench, enough_s))
    with nullcontext() if run.own_process else detached_at_the_end(run.device):
        explain(bench)
        run.keep(report(bench, enough_s))
        for each in bench.timed:
            if not each.proof and each.plan.name != ArmName.SELF_CHECK:
                run.teller.say(f"checking what {variant_in_a_sentence(each.plan.name)} ran", each.plan.name)
                prove(bench, each)
    return report(bench, enough_s)


def build(bench: Bench) -> None:
    """Build the variants; begin again with shallower models if the step as it is has too little memory.

    Some are built only if the fastest compiled step waits for the host, or last if little memory is free.
    """
    last, peak_gib = list[Attempt](), None
    mostly_free_gib = MOSTLY_FREE * (gpu_gib(bench.device) or math.inf)
    for attempt in list(bench.attempts):
        compiled = [each for each in bench.built if each.compiled]
        fastest = min(compiled, key=lambda each: each.steps_s, default=None)
        if attempt.plan.if_host_waits and not (fastest and fastest.waits_for_host):
            bench.attempts.remove(attempt)
        elif attempt.plan.place is Place.NO_CHECKPOINTING and (peak_gib or 0.0) > mostly_free_gib:
            last.append(attempt)
        else:
            _build_variant(attempt, bench)
        if attempt.plan.name == ArmName.AS_IS:
            while attempt.why is Reason.OUT_OF_MEMORY and bench.lay_out():
                attempt.no_number = None
                _build_variant(attempt, bench)
            peak_gib = attempt.full_peak(bench.plan)
    for attempt in last:
        _build_variant(attempt, bench)


def _build_variant(attempt: Attempt, bench: Bench) -> None:
    """Build a variant, unless there is no time for it, or its base has none.

    A base without a time leaves out explorations and BF16.
    """
    plan, run = attempt.plan, bench.run
    if attempt.no_number is None and plan.name != ArmName.AS_IS:
        base = next((each for each in bench.attempts if each.plan.name == plan.base), None)
        if base and base.no_number and (plan.explored or is_in_bf16(plan.name)):
            words = variant_in_a_sentence(base.plan.name)
            attempt.no_number = NoNumber(base.no_number.why, f"it changes {words}, which has no time")
        else:
            own = run.own_process
            attempt.no_number = run.budget.no_time_for(plan, bench.built, own_process=own)
    if attempt.no_number is None:
        run.teller.say(f"building {variant_in_a_sentence(plan.name)}", plan.name)
        bench.build(attempt, run.budget.build_until(bench.built))
        if beyond := beyond_gpu(attempt, bench.attempts, bench.plan, gpu_gib(bench.device)):
            bench.drop(attempt, beyond)


def _take_samples(bench: Bench) -> None:
    """Time the variants in turn at every depth, and watch the GPU and the host meanwhile.

    Begin again without one that raises, if it is not the step as it is.
    """

    def step_of(name: str, of: Ready) -> Callable[[], object]:
        def step() -> object:
            bench.at_work, before = name, frames_compiled()
            result = of.step()
            of.frames_in_window += frames_compiled() - before
            return result

        return step

    def look() -> None:
        bench.observer.look()
        bench.guard.look()

    while True:
        attempts = bench.timed
        bench.run.teller.say(f"timing {len(attempts)} variants of the step", None)
        ready = {(of.plan.name, number): each for of in attempts for number, each in enumerate(of.ready)}
        try:
            bench.samples = interleave(
                {key: step_of(key[0], each) for key, each in ready.items()},
                bench.device,
                bench.run.budget.rounds(attempts),
                look,
                begin=torch.manual_seed,  # all skip the same layers at random, and drop the same values
                expected_ms={key: 1e3 * each.step_s for key, each in ready.items()},
                is_open=partial(sign_is_open, plan=bench.plan, variants=[each.plan for each in attempts]),
            )
            bench.guard.look()  # on a CPU, each block is looked at when the next begins
            return
        except Exception as error:
            bench.guard.look()
            failed = next((each for each in attempts if each.plan.name == bench.at_work), None)
            if failed is None or failed.plan.name == ArmName.AS_IS:
                raise
            _log.debug("timing %s raises", failed.plan.name, exc_info=True)
            bench.drop(failed, raised(error))
