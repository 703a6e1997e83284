"""The next command, the open questions that could change the verdict, and how to answer them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from fp8doctor import registry
from fp8doctor.analysis.arms import left_out_bf16, uses_fp8
from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.memory_fit import fit
from fp8doctor.analysis.outcome import waits_for_time
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.analysis.trial_view import trial_view
from fp8doctor.diagnosis.answer import Verdict
from fp8doctor.diagnosis.document import EXPLAIN, Document, Next, Step
from fp8doctor.diagnosis.expected_verdict import expected_speedup, failed_early, has_no_fp8
from fp8doctor.facts import Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Outcome
from fp8doctor.wording import plural


def next_step(prescription: Iterable[Step], verdict: Verdict, facts: Facts) -> Next | None:
    """Choose the page of the plan's first check, else a command to measure, or None."""
    verify = run_again(facts)
    step = next((each for each in prescription if each.code), None)
    if step is not None:
        return Next(command=f"{EXPLAIN}{step.code}", saving_ms=step.saving_ms, verify=verify)
    memory = if_recorded(fit, facts)
    fails = failed_early(facts) or has_no_fp8(verdict, facts) or (memory is not None and memory.is_too_large)
    if verdict.basis != "measured" and not fails and verify is not None and not failed_to_time(facts):
        return Next(command=timed(facts) or verify, saving_ms=None, verify=verify)
    return None


def timed(facts: Facts, *, longer: bool = False) -> str | None:
    """Write the command that times copies of this job, ``longer`` than it did; None for a live model."""
    budget_s = facts.get("trial.budget_s") if longer else None
    budget = f"--budget {more_time_s(facts.trial) or _enough_s(facts.trial, budget_s):g} " if budget_s else ""
    if facts.get("target.kind") == "environment":
        return "fp8doctor model.py"
    return run_again(facts, f"--stop {budget}", budget)


def failed_to_time(facts: Facts) -> bool:
    """Return whether a trial on a GPU tried to time this job, and more time would not help."""
    trial = facts.get("trial")
    tried = trial is not None and trial.get("device") == "cuda" and bool(trial.get("arms"))
    return tried and not any(each.tried for each in trial.arms) and not more_time(facts)


def run_again(facts: Facts, option: str = "", of_a_file: str = "") -> str | None:
    """Write the command that examines the same job again; None for a live model.

    It starts in the job's folder. A script's arguments are the user's data, so a word stands for them.
    """
    if not recorded(facts, "target.kind") or not recorded(facts, "target.name"):
        return None
    kind, name = facts.target.kind, shlex.quote(facts.target.name)
    if kind == "environment":
        return "fp8doctor env"
    if kind == "live":
        return None
    if kind != "script":
        return f"{launcher(facts)}fp8doctor {of_a_file}{name}"
    dotted = "." in name and "/" not in name and not name.endswith(".py")  # older reports do not say
    module = "-m " if facts.get("target.module", dotted) else ""
    return f"{launcher(facts)}fp8doctor run {option}{module}{name} ARGS..."


LAUNCHER_SETS = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_MODE"}
"""Variables that ``accelerate launch`` always writes. Source: accelerate 1.15, ``utils/launch.py``."""


def launcher(facts: Facts) -> str:
    """Write the launcher that started the job, with a word for its options; empty without one."""
    if facts.variables().keys() >= LAUNCHER_SETS:
        return "accelerate launch ... -m "
    return "torchrun ... -m " if facts.get("ranks.world_size", 1) > 1 else ""


def may_break(outcomes: Iterable[Outcome], verdict: Verdict, facts: Facts) -> list[str]:
    """Say what checks that could predict a broken job do not know.

    Nothing of an exception if the step ran on a GPU, and nothing of what the verdict says anyway.
    """
    if not recorded(facts, "network") or verdict.status == "step_raises":
        return []
    ran = if_recorded(ran_on_a_gpu, facts)
    learns = verdict.status not in ("layers_do_not_learn", "not_finite")
    checks = {
        check.code: check for check in registry.discover() if check.may_raise or check.may_stop_learning
    }
    told = []
    for each in outcomes:
        if each.code not in checks or each.outcome != "unknown" or _waits_for_trial(each):
            continue
        why = f"Unknown: {reason}" if (reason := _reason(each, facts)) else TOO_OLD
        if checks[each.code].may_raise and not ran:
            told.append(f"does the step fail on a GPU? {why}")
        elif checks[each.code].may_stop_learning and learns:
            told.append(f"do the layers learn? {why}")
    return list(dict.fromkeys(told))


def open_questions(outcomes: Iterable[Outcome], verdict: Verdict, facts: Facts) -> list[str]:
    """List possible exceptions, other errors that no check could rule out, and speed."""
    outcomes = tuple(outcomes)
    errors = {
        check.code
        for check in registry.discover()
        if check.severity == "error"
        and not check.may_raise
        and not check.may_stop_learning
        and check.area != "device"  # speed needs a GPU too
    }
    others = [
        each
        for each in outcomes
        if each.code in errors and each.outcome in ("unknown", "crashed") and not _waits_for_trial(each)
    ]
    others = [each for each in others if _reason(each, facts)]  # an old report could not look
    told = may_break(outcomes, verdict, facts)
    if others:
        told.append(f"{plural(len(others), 'check')} without an answer ({_reason(others[0], facts)})")
    in_fp8, outside = if_recorded(uses_fp8, facts), facts.get("network.fp8_calls")
    if verdict.basis != "measured":
        if in_fp8 or outside:
            told.append("its speed and its numerics")
        elif not if_recorded(trains_in_16_bits, facts):
            told.append("what FP8 would gain")
    elif outside and not in_fp8:
        told.append("what BF16 would take")
    return sorted(told, key=lambda each: each.endswith(TOO_OLD))  # a sentence of its own


def _reason(outcome: Outcome, facts: Facts) -> str:
    """Say why a check is unknown; empty if the version that wrote the report did not look."""
    return (registry.reason_of(outcome, facts) or "").rstrip(".")


TOO_OLD = "The older version that wrote this report did not check"
"""Says that a check reads facts that the version which wrote the report did not record."""


def _waits_for_trial(outcome: Outcome) -> bool:
    """Return whether a check waits for times, for which the question of speed stands."""
    return outcome.get("missing", "").partition(".")[0] in ("trial", "observed")


def opened(report: Document) -> Iterator[str]:
    """Say what could still make the step raise, or its layers not learn."""
    for question in may_break(report.outcomes, report.verdict, report.facts):
        again = run_again(report.facts) if question.endswith(TOO_OLD) else None
        yield f"Open: {question}{f'; make a new one: {again}' if again else '.'}"


def nothing_found(report: Document, nothing: str) -> str:
    """Say that ``nothing`` has to change, or which questions could change the verdict."""
    questions = open_questions(report.outcomes, report.verdict, report.facts)
    if trial_view(report.facts).size_is_wrong:
        how = f": {again}" if (again := timed(report.facts)) else "."
        return f"Nothing to change. To know how much faster it is, time it again on an idle GPU{how}"
    if not questions:
        return nothing
    expects = if_recorded(expected_speedup, report.facts, report.findings)
    nothing = (
        "No fix is known." if expects and expects.other_work_leads else "No check found anything to change."
    )
    told = f"{nothing} Open: {'; '.join(questions)}."
    if failed_to_time(report.facts) and (again := run_again(report.facts)):
        return f"{told} Its copies cannot be timed here: watch your script in BF16 too, and compare: {again}"
    if how := how_to_time(report):
        return f"{told} Time it {where_to_time(report.facts)}: {how}"
    again = run_again(report.facts)
    return f"{told} Run it again: {again}" if again else told


def how_to_time(report: Document) -> str:
    """Write the command that times the job, if it was not timed."""
    if report.verdict.basis == "measured":
        return ""
    live = report.facts.get("target.kind") == "live"
    return report.next.command if report.next else "call inspect_model there." if live else ""


def where_to_time(facts: Facts) -> str:
    """Say what a trial would add: a GPU, or BF16 if the job's steps ran on one."""
    if facts.get("observed.clock") == "cuda":
        return f"next to {'BF16' if if_recorded(uses_fp8, facts) else 'FP8'}"
    return "on this GPU" if facts.get("gpus") else "on a GPU"


def more_time(facts: Facts) -> str:
    """Write the option that gives a trial time for the variants left out, an argument in Python.

    Empty if none was left out for time.
    """
    seconds = if_recorded(more_time_s, facts.get("trial"))
    live = facts.get("target.kind") == "live"
    return "" if not seconds else f"budget_s={seconds:g}" if live else f"--budget {seconds:g}"


def with_more_time(facts: Facts) -> str:
    """Write the whole command with the budget that `more_time` names; its argument for a live model."""
    return more_time(facts) and (timed(facts, longer=True) or more_time(facts))


def more_time_s(trial: Trial | None) -> float | None:
    """Return the budget that would fit the variants left out for time, if any."""
    if trial is None:
        return None
    no_arm = recorded(trial, "arms") and not trial.arms and why_of(trial) is Reason.NO_TIME_LEFT
    waits = no_arm or if_recorded(waits_for_time, trial) or if_recorded(left_out_bf16, trial)
    budget_s = trial.get("budget_s")
    return _enough_s(trial, budget_s) if waits and budget_s else None


def _enough_s(trial: Trial, budget_s: float) -> float:
    """Return the budget that is expected to fit the rest; for old recordings a guess."""
    if enough_s := trial.get("enough_s"):
        return max(float(enough_s), budget_s)
    took_s = max(budget_s, trial.get("elapsed_s") or 0.0)
    return 2 * budget_s if took_s < 1.2 * budget_s else 30 * max(1, round((took_s + budget_s) / 30))
