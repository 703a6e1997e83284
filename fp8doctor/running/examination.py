"""From what was seen of a script to facts: the live job examined, and timed on copies where that is asked
for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from torch import nn
from torch.optim.optimizer import Optimizer

from fp8doctor.diagnosis.diagnose import hypotheses
from fp8doctor.examine import examine, examine_surroundings
from fp8doctor.examine.autocasts import undecided
from fp8doctor.examine.conversion import Watch
from fp8doctor.examine.dynamo import compiled_nothing
from fp8doctor.examine.environment import variables_put_back
from fp8doctor.examine.fp8_arguments import fp8_arguments
from fp8doctor.examine.training import examine_accelerate, trainer_arguments
from fp8doctor.facts import NOT_RECORDED, Facts, Observation, Target, Training, recorded
from fp8doctor.facts.training import UNNAMED
from fp8doctor.loading.given_batch import Batch, describe
from fp8doctor.loading.job import Job
from fp8doctor.running.messages import Message, Progress
from fp8doctor.running.settings import Settings
from fp8doctor.running.stepped_model import Ownership
from fp8doctor.running.window import Window
from fp8doctor.stacks.looking import read
from fp8doctor.stacks.torch_private import behind_compile, without_modes
from fp8doctor.stages import Course, Doing, Teller

NO_OWNER = "no module that is alive owns half of the parameters that the optimizer steps"
FAILED_EARLY = "the script failed before its first step"
NOT_SEEN_YET = "the steps were not watched to the end of the window"
NO_CALL = "no training call of the model itself was seen in the window"
COMPILED_FUNCTION = (
    "a function of the script is compiled, and marking a model that it may call would compile it again"
)
CLOSURE = "the optimizer was given a closure, which may call the model several times a step"


class Examination:
    """Makes facts of a script's live objects, in the script's process."""

    def __init__(self, settings: Settings, watch: Watch | None, send: Callable[[Message], None]) -> None:
        self.settings, self.watch, self.send = settings, watch, send
        self.arguments = fp8_arguments(sys.argv[1:])
        self.target = Target(kind="script", name=settings.script, attribute=None, module=settings.module)

    def early(self, owner: Ownership | None, optimizer: Optimizer) -> Facts:
        """Examine what is there before a batch or a time is known."""
        return self._facts(owner, optimizer, Batch(None, None, NOT_SEEN_YET), None)[1]

    def without_a_step(self, trainer: Any) -> Facts:
        """Examine what is there without a model, for a script that fails before its first step."""
        training = Training(
            accelerate=examine_accelerate(None), trainer=trainer_arguments(read(trainer, "args"))
        )
        return msgspec.structs.replace(self._without_a_model(FAILED_EARLY), training=training)

    def whole(
        self,
        owner: Ownership | None,
        optimizer: Optimizer,
        window: Window,
        observation: Observation | None,
        *,
        closure: bool,
    ) -> tuple[Job | None, Facts]:
        """Examine the job with its batch and its times."""
        captured = window.captured
        if captured is not None and captured.batch is not None:
            batch = Batch(captured.batch, "given", None)
        else:
            batch = Batch(None, None, self._why_no_batch(owner, window, closure))
        job, facts = self._facts(owner, optimizer, batch, window)
        if observation is not None:
            facts = msgspec.structs.replace(facts, observed=observation)
        return job, facts

    def _why_no_batch(self, owner: Ownership | None, window: Window, closure: bool) -> str:
        if closure:
            return CLOSURE
        if owner is not None and not window.marked:
            return COMPILED_FUNCTION
        return (window.captured.problem if window.captured else None) or NO_CALL

    def _facts(
        self, owner: Ownership | None, optimizer: Optimizer, batch: Batch, window: Window | None
    ) -> tuple[Job | None, Facts]:
        if owner is None:
            return None, self._without_a_model(NO_OWNER)
        captured = window.captured if window else None
        model: nn.Module = captured.module if captured is not None else owner.model
        loss = captured.loss() if captured is not None else None
        accumulate = window.calls if window is not None and window.calls else 1
        unseen = "" if window and window.seen else NO_CALL if window else NOT_SEEN_YET
        autocast = window.autocast if window else None
        workload = describe(
            model,
            batch,
            computes_loss=loss is not None,
            optimizer=True,
            autocast=autocast,
            accumulate=accumulate,
        )
        if captured is None:
            workload = msgspec.structs.replace(workload, loss_source=NOT_RECORDED)
        if unseen:
            workload = msgspec.structs.replace(workload, autocast_source=NOT_RECORDED)
        unused = window is not None and compiled_nothing()
        job = Job(
            model=model,
            unused_marks=unused,
            compiled_elsewhere=wrappers_of(model, owner) if unused else (),
            target=self.target,
            workload=workload,
            batch=batch.value,
            loss=loss,
            optimizer=optimizer if owner.wrapper is None else owner.wrapper,
            other_optimizers=tuple(each for each in owner.optimizers if each is not optimizer),
            autocast=autocast,
            unseen=unseen,
            around=captured.around if captured is not None else nullcontext,
            trainer=owner.trainer,
            watched=self.watch,
        )
        with without_modes(), variables_put_back():
            facts = examine(job)
            if batch.value is not None and undecided(facts):
                from fp8doctor.trial import with_calls

                facts = with_calls(job, facts)
        asked = msgspec.structs.replace(facts.environment, fp8_arguments=self.arguments)
        return job, msgspec.structs.replace(facts, environment=asked)

    def _without_a_model(self, why: str) -> Facts:
        facts = examine_surroundings(self.target)
        gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
        return msgspec.structs.replace(facts, gaps={**gaps, "network": why})

    def timed(self, job: Job, facts: Facts, budget_s: float) -> Facts:
        """Add a trial on copies to the facts, where there is something to time on."""
        from fp8doctor.trial import Budget, DeviceLost, TrialRun, lost_with, run_trial
        from fp8doctor.trial.measure.trial_run import choose_device

        settings = self.settings
        device = choose_device(settings.device)
        if device is None:
            return facts
        proposed = hypotheses(
            facts, select=settings.select, ignore=settings.ignore, checks=tuple(map(Path, settings.checks))
        )

        budget, course = Budget(budget_s), Course()

        def tell(doing: Doing, arm: str | None) -> None:
            if course.take(doing):
                self.send(Progress(course.line()))

        teller = Teller(tell, budget.end)
        run = TrialRun(device, budget, teller.say, begin=teller.begin)
        with without_modes(), variables_put_back():
            try:
                trial = run_trial(job, facts, proposed, run)
            except DeviceLost as lost:
                trial = lost_with(lost, run)
        return msgspec.structs.replace(facts, trial=trial)


def wrappers_of(model: nn.Module, owner: Ownership) -> tuple[str, ...]:
    """Name what ``torch.compile`` made of the model, where the script calls the model itself."""
    if not any(each is model for each in owner.inside):
        return ()
    names = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    found = [name for name, value in list(names.items()) if behind_compile(value) is model]
    return tuple(found) or (UNNAMED,)
