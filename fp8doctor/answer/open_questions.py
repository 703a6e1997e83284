"""What is unknown of an answer, in doubt, and open, and the commands that close it."""

import shlex
from collections.abc import Iterator, Sequence

from fp8doctor.analysis.arms import lacked_time
from fp8doctor.analysis.fp8_request import is_launched, under_unsloth
from fp8doctor.analysis.modelled_speedup import TAKES_NONE
from fp8doctor.analysis.noise import BUSY_HOST, busy_host, disturbances
from fp8doctor.analysis.own_step import as_is, compiles_any
from fp8doctor.analysis.recipe_support import visible_gpus
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import copy_overhead
from fp8doctor.answer.items import AREAS
from fp8doctor.answer.record import Answer
from fp8doctor.answer.verdict import Open
from fp8doctor.diagnosis.estimate import Expected, compiles
from fp8doctor.facts import Arm, ArmName, Facts, Trial, if_recorded, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Outcome

UNCOMPILED = "torch.compile is untimed"
QUIET = "use a quiet machine"
NOISE = f"too noisy to rank; {QUIET}"
NOISE_AT_END = f"the fastest FP8 and BF16 are {NOISE}"
LIVE = "inspect_model(model, batch)"
"""What times a live model."""

SLOWS = ("engagement", "shapes", "compilation", "checkpointing", "distributed", "step")
"""Areas of checks that find what makes a step slow."""


def unchecked(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    areas = {each.area for each in outcomes if each.outcome == "unknown"}
    return tuple(AREAS.get(each, each) for each in SLOWS if each in areas)


def why_unknown(view: TrialView, expected: Expected, after: str) -> str:
    """Say why there is no speedup, timed or estimated."""
    tried = [each for each in view.facts.arms() if each.get("tried")]
    untimed = None if view.as_is else as_is(view.facts)
    nothing = view.trial.get("reason") if view.on_gpu and not tried else None
    if why := (untimed and untimed.get("reason")) or nothing:
        return f"the step was not timed: {why.rstrip('.')}"
    if view.takes_no_conversion:
        return TAKES_NONE
    if view.late_bf16 or view.late_fp8:
        return ""  # what has to be timed first is open
    return f"only the step {after} can be estimated" if after else expected.why_not


def doubts_of(view: TrialView) -> Iterator[str]:
    """Say in a few words what may have changed the times; the notes below the table say how much.

    Also a host that was busy enough to leave open how FP8 compares, as it runs or at its best.
    """
    found, trial = disturbances(view.trial), view.trial
    yield from found
    pairs = ((view.bf16, view.as_is), (view.fair_bf16(view.fp8), view.fp8))
    unsure = (
        busy_host(trial, (bf16.arm, fp8.arm), 100 * EVEN)
        for bf16, fp8 in pairs
        if bf16 and fp8 and view.speed(fp8, bf16).side == "open"
    )
    if not found and any(unsure):
        yield BUSY_HOST
    if view.facts.get("training.layerdrop"):
        yield "LayerDrop skips layers at random"
    if if_recorded(copy_overhead, view.facts):
        yield "the copy is slower than your step"


def open_questions(view: TrialView, said: Answer) -> tuple[Open, ...]:
    """Say what could change the verdict or the plan, the gravest alone, with its command."""
    facts, whole = view.facts, said.whole
    gpus = visible_gpus(facts)
    live = LIVE if gpus else f"{LIVE} on a GPU"
    again, time_it = run_again(facts) or "", with_more_time(facts) or timed(facts) or live
    measured = said.compared.timed
    seen = said.speedup if measured else None
    other = "BF16" if said.has_fp8 else said.low_precision
    late = said.untimed if measured and not said.leaves_fp8 else {}
    lacked_time = {name for each in view.late.values() for name in each.get("treatments", ())}
    by_hand = any(each.treatment.name not in lacked_time for each in late.values())
    numbers = " and ".join(map(str, late))
    where = "; on a GPU" if gpus == [] and time_it != live and said.speedup else ""
    decides = _untimed_form(view, *_deciding(view, said))
    first = _untimed_form(view, None if said.is_decided else view.late_first)
    untimed = ", ".join(_estimates(view, said))
    end = said.compared.end
    lacks_fair_bf16 = measured and said.compared.gain and end and end.in_fp8 and not said.compared.end_speedup
    is_whole_open = said.lacks_whole or (whole and whole[0] < 1 < whole[1])
    copy = as_is(facts)
    needs_run = copy is not None and copy in view.too_large.values() and view.watched is not None
    questions = (
        (decides, decides, time_it),
        (seen and seen.side == "open", NOISE, time_it),
        (said.leaves_fp8 and view.fp8_is_undecided, NOISE_AT_END, time_it),
        (is_whole_open, f"the whole step; compare a run in {other}", again),
        (first, first, time_it),
        (lacks_fair_bf16, "BF16 with the same changes was not timed", time_it),
        (late and by_hand, f"apply fix {numbers}, time it", timed(facts) or live),
        (late, f"fix {numbers} was not timed", time_it),
        (seen and seen.has_open_size and not said.fault, f"{_not_known(said)}; {QUIET}", time_it),
        (untimed and needs_run, f"{untimed}; compare a run in {other}", again),
        (untimed, f"{untimed}{where}", time_it),
        (said.unchecked and not said.fixes and not said.fault, f"other causes need a trial{where}", time_it),
    )
    return next(((Open(what=what, command=command),) for is_open, what, command in questions if is_open), ())


def _untimed_form(view: TrialView, *forms: Arm | None) -> str:
    """Name the first of these variants as untimed; empty if there is none."""
    words = next((view.words[each.name] for each in forms if each), "")
    return words and f"{words}{',' * (',' in words)} is untimed"


def _deciding(view: TrialView, said: Answer) -> Iterator[Arm | None]:
    """List the variants without a time that may turn the answer, what decides most first."""
    found = said.speedup if said.compared.timed else None
    bf16 = view.late_bf16 if said.leaves_fp8 or not (found and found.high < 1) else None
    yield view.late.get(ArmName.AS_IS)
    if bf16 and bf16.name == ArmName.BF16_AS_COMPILED:
        yield bf16
    yield view.late_fp8 or (None if view.in_fp8 else view.late_first)
    yield bf16
    if said.leaves_fp8 or not said.has_fp8:
        yield view.late.get(ArmName.BF16_WHOLE)
    if not said.has_fp8:
        yield view.late.get(ArmName.BF16_PRESCRIBED)


def _estimates(view: TrialView, said: Answer) -> Iterator[str]:
    """Say what an estimate, or a job without one, leaves open."""
    measured = said.compared.timed
    if not measured and not said.is_settled:
        yield _not_known(said)
    settled = measured or said.fault or said.takes_no_fp8 or if_recorded(under_unsloth, view.facts)
    if not (settled or view.table or compiles_any(view.facts) or any(map(compiles, said.fixes))):
        yield UNCOMPILED


def _not_known(said: Answer) -> str:
    low, speedup = said.low_precision, said.speedup
    if said.fault and (said.fault.first or (said.status == "step_raises" and not said.fixes)):
        return "all else, once that is solved"
    if speedup is None:
        if (said.status == "step_raises" or said.takes_no_fp8) and said.fixes:
            return f"apply {'the fixes' if said.fixes[1:] else 'fix 1'}, time it"
        if said.has_fp8 and said.compared.now is not None:
            return "how fast BF16 is"
        others = said.steps is not None and said.steps.rows and said.has_fp8
        where = "as you run it" if others else f"on {said.compared.gpu or 'a GPU'}"
        return f"how fast {low} is {where}"
    if speedup.side in ("open", "even"):
        return "which is faster"
    return f"how much {speedup.side} {low} is" if speedup.has_open_size else "the fixes were not timed"


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
