"""Examine a script's live job in the script's process, and time copies of it if asked."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from torch.optim.optimizer import Optimizer

from fp8doctor.diagnosis.diagnose import hypotheses
from fp8doctor.examine import examine, examine_surroundings
from fp8doctor.examine.environment import variables_put_back
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.examine.training_state import compiled_nothing, examine_accelerate, trainer_arguments
from fp8doctor.facts import NOT_RECORDED, Facts, Target, Training, recorded
from fp8doctor.loading.job import Job
from fp8doctor.loading.synthetic_batch import job_of
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.running.step_window import StepWindow
from fp8doctor.running.stepped_model import LiveObjects, Ownership
from fp8doctor.stacks.looking import read
from fp8doctor.stacks.torch_private import behind_compile, without_modes
from fp8doctor.stages import Course, Doing
from fp8doctor.trial.copies.replica import unwrapped
from fp8doctor.trial.layers.seen_calls import with_seen

NO_OWNER = "no module that is alive owns half of the parameters that the optimizer steps"
FAILED_EARLY = "the script failed before its first step"
NOT_SEEN_YET = "the steps were not watched to the end of the window"
NO_CALL = "no training call of the model itself was seen in the window"
COMPILED_FUNCTION = (
    "a function of the script is compiled, and marking a model that it may call would compile it again"
)


def without_a_step(target: Target, living: LiveObjects) -> Facts:
    """Examine a script that fails before its first step."""
    trainers = living.found()[2]
    arguments = trainer_arguments(read(trainers[0], "args") if len(trainers) == 1 else None)
    training = Training(accelerate=examine_accelerate(None), trainer=arguments)
    return replace(_without_a_model(target, FAILED_EARLY), training=training)


def _without_a_model(target: Target, why: str) -> Facts:
    facts = examine_surroundings(target)
    return replace(facts, gaps={**facts.get("gaps", {}), "network": why})


def examined(
    target: Target,
    owner: Ownership | None,
    optimizer: Optimizer,
    window: StepWindow | None,
    watch: ConversionWatch | None,
) -> tuple[Job | None, Facts]:
    """Examine the job; without its window neither a batch nor a time is known."""
    if owner is None:
        return None, _without_a_model(target, NO_OWNER)
    captured = window.captured if window else None
    model = captured.module if captured else owner.model
    unseen = "" if window and window.seen else NO_CALL if window else NOT_SEEN_YET
    why_none = NOT_SEEN_YET if window is None else NO_CALL if window.marked else COMPILED_FUNCTION
    if captured:
        why_none = captured.problem or ""
    unused = window is not None and compiled_nothing()
    job = job_of(
        model,
        target,
        captured.batch if captured else None,
        why_none=why_none,
        accumulate=window.usual_calls if window else 1,
        unused_marks=unused,
        in_a_function=window is not None and window.in_a_function,
        loss=captured.loss() if captured else None,
        optimizer=optimizer if owner.wrapper is None else owner.wrapper,
        other_optimizers=tuple(each for each in owner.optimizers if each is not optimizer),
        autocast=window.autocast if window else None,
        unseen=unseen,
        opens_autocast=window is not None and window.opened,
        around=captured.around if captured else nullcontext,
        trainer=owner.trainer,
        watched=watch,
    )
    missing = {"loss_source": captured is None, "autocast_source": bool(unseen)}
    unknown = {name: NOT_RECORDED for name, is_missing in missing.items() if is_missing}
    job.workload = replace(job.workload, **unknown)
    with without_modes(), variables_put_back():
        facts = examine(job)
        if window and captured and recorded(facts, "network.linears"):
            wanted = [each.name for each in facts.network.linears]
            facts = with_seen(facts, window.seen_calls(unwrapped(model, refuse=False), wanted))
    if unused and (inner := behind_compile(model)) is not None:  # which the steps call, or its forward
        job.model = inner
    return job, facts


def timed(job: Job, facts: Facts, settings: WatchOptions, send: Callable[[Message], None]) -> Facts:
    """Add a trial on copies to the facts, if there is a time and a device for it."""
    from fp8doctor.trial import Budget, time_copies

    course, budget = Course(), Budget(settings.budget_s or 0.0)
    checks = tuple(map(Path, settings.checks))
    propose = partial(hypotheses, select=settings.select, ignore=settings.ignore, checks=checks)

    def show(doing: Doing, variant: str | None) -> None:
        if course.take(doing):
            send(Message(progress=course.line()))

    with without_modes(), variables_put_back():
        facts = time_copies(job, facts, settings.device, propose, budget, show) or facts
    if recorded(facts, "trial") and not facts.trial.arms:
        send(Message(note=f"copies of the step gave no times: {facts.trial.reason}"))
    return facts
