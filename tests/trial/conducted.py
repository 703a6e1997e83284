"""The variants of a job, timed without a forward of a copy and without its shapes."""

from collections.abc import Sequence

from fp8doctor.facts import Trial
from fp8doctor.loading.job import Job
from fp8doctor.trial.conductor import left_alone, timed
from fp8doctor.trial.copies.step import VariantPlan
from fp8doctor.trial.measure.budget import TrialRun
from fp8doctor.trial.state.settings import with_harm


def conduct(job: Job, lists: Sequence[str], plans: Sequence[VariantPlan], run: TrialRun) -> Trial:
    with left_alone(job, run) as changed:
        trial = timed(job, lists, plans, run)
    return with_harm(trial, changed)
