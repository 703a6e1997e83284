"""Examine a script's live job, and time copies of it if asked."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.diagnosis.diagnose import hypotheses
from fp8doctor.examine import examine, examine_surroundings
from fp8doctor.examine.environment import variables_put_back
from fp8doctor.examine.fp8_conversion import ConversionWatch
from fp8doctor.examine.torch_state import compiled_nothing
from fp8doctor.examine.training_state import examine_accelerate, trainer_arguments
from fp8doctor.facts import NOT_RECORDED, Facts, Target, Training, recorded
from fp8doctor.loading.job import Job
from fp8doctor.loading.synthetic_batch import job_of
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.running.step_window import StepWindow
from fp8doctor.running.stepped_model import Ownership
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


class ScriptExaminer:
    """Makes facts of the script's live objects, in the script's process."""

    def __init__(
        self, settings: WatchOptions, watch: ConversionWatch | None, send: Callable[[Message], None]
    ) -> None:
        self.settings, self.watch, self.send = settings, watch, send
        self.target = Target(kind="script", name=settings.script, attribute=None, module=settings.module)

    def without_a_step(self, trainer: Any) -> Facts:
        """Examine a script that fails before its first step."""
        training = Training(
            accelerate=examine_accelerate(None), trainer=trainer_arguments(read(trainer, "args"))
        )
        return msgspec.structs.replace(self._without_a_model(FAILED_EARLY), training=training)

    def examined(
        self, owner: Ownership | None, optimizer: Optimizer, window: StepWindow | None
    ) -> tuple[Job | None, Facts]:
        """Examine the job; without its window neither a batch nor a time is known."""
        if owner is None:
            return None, self._without_a_model(NO_OWNER)
        captured = window.captured if window else None
        model: nn.Module = captured.module if captured is not None else owner.model
        loss = captured.loss() if captured is not None else None
        accumulate = window.usual_calls if window is not None else 1
        unseen = "" if window and window.seen else NO_CALL if window else NOT_SEEN_YET
        autocast = window.autocast if window else None
        unused = window is not None and compiled_nothing()
        job = job_of(
            model,
            self.target,
            captured.batch if captured is not None else None,
            why_none=_why_no_batch(window),
            accumulate=accumulate,
            unused_marks=unused,
            in_a_function=window is not None and window.in_a_function,
            loss=loss,
            optimizer=optimizer if owner.wrapper is None else owner.wrapper,
            other_optimizers=tuple(each for each in owner.optimizers if each is not optimizer),
            autocast=autocast,
            unseen=unseen,
            opens_autocast=window is not None and window.opened,
            around=captured.around if captured is not None else nullcontext,
            trainer=owner.trainer,
            watched=self.watch,
        )
        missing = {"loss_source": captured is None, "autocast_source": bool(unseen)}
        unknown = {name: NOT_RECORDED for name, is_missing in missing.items() if is_missing}
        job.workload = msgspec.structs.replace(job.workload, **unknown)
        with without_modes(), variables_put_back():
            facts = examine(job)
            if window is not None and captured is not None and recorded(facts, "network.linears"):
                wanted = [each.name for each in facts.network.linears]
                facts = with_seen(facts, window.seen_calls(unwrapped(model, refuse=False), wanted))
        if unused and (inner := behind_compile(model)) is not None:  # which the steps call, or its forward
            job.model = inner
        return job, facts

    def _without_a_model(self, why: str) -> Facts:
        facts = examine_surroundings(self.target)
        return msgspec.structs.replace(facts, gaps={**facts.get("gaps", {}), "network": why})

    def timed(self, job: Job, facts: Facts, budget_s: float) -> Facts:
        """Add a trial on copies to the facts, if there is a device for it."""
        from fp8doctor.trial import Budget, time_copies

        settings, course = self.settings, Course()
        checks = tuple(map(Path, settings.checks))
        propose = partial(hypotheses, select=settings.select, ignore=settings.ignore, checks=checks)

        def show(doing: Doing, variant: str | None) -> None:
            if course.take(doing):
                self.send(Message(progress=course.line()))

        with without_modes(), variables_put_back():
            facts = time_copies(job, facts, settings.device, propose, Budget(budget_s), show) or facts
        if recorded(facts, "trial") and not facts.trial.arms:
            self.send(Message(note=f"copies of the step gave no times: {facts.trial.reason}"))
        return facts


def _why_no_batch(window: StepWindow | None) -> str:
    if window is None:
        return NOT_SEEN_YET
    captured = window.captured
    if captured is not None and captured.batch is not None:
        return ""
    problem = captured.problem if captured is not None else NO_CALL
    return (problem or NO_CALL) if window.marked else COMPILED_FUNCTION
