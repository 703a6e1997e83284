"""What is tried only where the host sets the pace: an arm that was built is asked, and more are planned.

The kernels of a step are profiled after all arms were timed, so that it is asked by a head start
(`fp8doctor.trial.measure.head_start`). What is added comes before all that nobody proposed.
"""

from __future__ import annotations

import logging

from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.trial.measure.attempt import Attempt
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.device import still_there
from fp8doctor.trial.measure.head_start import waits_for_host
from fp8doctor.trial.measure.run import TrialRun

_log = logging.getLogger("fp8doctor")

STAYS_IN_THIS_PROCESS = NoNumber(
    Reason.NOT_APPLICABLE,
    "the memory of recorded CUDA graphs would stay taken in this process; `fp8doctor model.py` times them in "
    "one of its own",
)


def add_against_host(attempt: Attempt, bench: Bench, attempts: list[Attempt], run: TrialRun) -> None:
    """Add what is tried where the host sets the pace of this arm, if it does."""
    plans = attempt.plan.if_host_bound
    if attempt.ready and plans and _waits(attempt, bench):
        first = next((n for n, each in enumerate(attempts) if each.plan.explored), len(attempts))
        against = None if run.own_process else STAYS_IN_THIS_PROCESS
        attempts[first:first] = [Attempt(plan, no_number=run.skipped(plan.name) or against) for plan in plans]


def _waits(attempt: Attempt, bench: Bench) -> bool:
    """Whether the host sets the pace of an arm. Where that cannot be asked, as for want of memory, the arm
    itself has run, and is timed all the same."""
    bench.at_work = attempt.plan.name
    try:
        return waits_for_host(attempt.ready[-1], bench.device)
    except Exception:
        _log.debug("the head start of %s raises", attempt.plan.name, exc_info=True)
        still_there(bench.device, attempt.plan.name)
        bench.forget_gradients()
        return False
