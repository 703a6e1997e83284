"""The commands that examine a job again or time it, and what only they can answer."""

import shlex

from fp8doctor.analysis.arms import lacked_time
from fp8doctor.analysis.fp8_request import is_launched
from fp8doctor.facts import Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import why_of


def timed(facts: Facts, budget: str = "") -> str | None:
    """Write the command that times copies of this job, with this option if any; None for a live model."""
    budget = f"{budget} " if budget else ""
    return run_again(facts, f"--stop {budget}", budget)


def run_again(facts: Facts, option: str = "", of_a_file: str = "") -> str | None:
    """Write the command that examines the same job again; None for a live model.

    It starts in the job's folder. A script's arguments are the user's data, so a word stands for them.
    """
    kind, name = facts.get("target.kind", "live"), shlex.quote(facts.get("target.name", ""))
    if kind == "environment":
        return "fp8doctor env"
    if kind == "live":
        return None
    if kind != "script":
        return f"{launcher(facts)}fp8doctor {of_a_file}{name}"
    dotted = "." in name and "/" not in name and not name.endswith(".py")  # older reports do not say
    module = "-m " if facts.get("target.module", dotted) else ""
    return f"{launcher(facts)}fp8doctor run {option}{module}{name} ARGS..."


def launcher(facts: Facts) -> str:
    """Write the launcher that started the job, with a word for its options; empty without one."""
    if is_launched(facts):
        return "accelerate launch ... -m "
    return "torchrun ... -m " if facts.get("ranks.world_size", 1) > 1 else ""


def more_time(facts: Facts) -> str:
    """Write the option that gives a trial time for the variants left out, an argument in Python.

    Empty if none was left out for time.
    """
    seconds = if_recorded(more_time_s, facts.get("trial", Trial()))
    live = facts.get("target.kind") == "live"
    return "" if not seconds else f"budget_s={seconds:g}" if live else f"--budget {seconds:g}"


def with_more_time(facts: Facts) -> str:
    """Write the whole command with the budget that `more_time` names; its argument for a live model."""
    added = more_time(facts)
    return added and (timed(facts, added) or added)


MOST_S = 900.0
"""Longest budget that is advised: what decides is timed first. A choice."""


def more_time_s(trial: Trial) -> float | None:
    """Return the budget that would fit the variants left out for time, if any; for old recordings a guess."""
    no_arm = recorded(trial, "arms") and not trial.arms and why_of(trial) is Reason.NO_TIME_LEFT
    budget_s: float | None = trial.get("budget_s")
    if not budget_s or not (no_arm or any(map(lacked_time, trial.get("arms", ())))):
        return None
    if enough_s := trial.get("enough_s"):
        return max(min(float(enough_s), MOST_S), budget_s)
    return 30 * max(1, round(max(budget_s, trial.get("elapsed_s") or 0.0) / 15))
