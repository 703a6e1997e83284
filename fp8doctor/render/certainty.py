"""Basis of an answer, how far to trust it, and the upper bound of FP8."""

from __future__ import annotations

from collections.abc import Sequence

from fp8doctor.analysis.arms import arm, best_bf16, timed_on_cpu
from fp8doctor.analysis.modelled_speedup import ERROR
from fp8doctor.analysis.noise import copies_differ, self_check_ratio
from fp8doctor.analysis.outcome import ceiling
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, that_help_bf16_too
from fp8doctor.analysis.trial_view import TrialView, trial_view
from fp8doctor.diagnosis.answer import GRAVE, own_step_failed
from fp8doctor.diagnosis.document import Document, Step
from fp8doctor.facts import Facts, Trial, if_recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.render.timing import spread
from fp8doctor.wording import in_times, percent, plural

UNRELIABLE = ", so do not rely on these times"


WIDE = 1.1
"""Upper end of the interval of a ratio / its lower one, from which a reader has to know both: a tenth is more
than most fixes of a compiled step give. A convention of this tool."""


def certainty(report: Document) -> str:
    """Say how sure the answer is: timed and how well, modelled, by rule, or not."""
    verdict, facts = report.verdict, report.facts
    view = trial_view(facts)
    timed, what = if_recorded(_timed, view, verdict.status in GRAVE) or "", view.host_contention
    disturbed = f" The CPU was busy: {what}." if what else ""
    if verdict.status == "too_noisy":
        return f"No. {timed or 'The times spread too far.'}{disturbed}"
    watched = plural(len(facts.observed.steps_ms), "step") if _was_watched(facts) else ""
    if verdict.status in GRAVE:
        raised = own_step_failed(facts)
        how = "it was seen in a step that ran" if raised else "it was read from the job itself"
        return f"Yes: {how}. {timed}" if timed else f"Yes: {how}{'' if raised else f'; {_seen(watched)}'}."
    if verdict.basis == "measured":
        return (
            f"{_how_sure(view)}{_range(report)}: {timed[:1].lower()}{timed[1:]}{disturbed}"
            if timed
            else "Yes: it was timed."
        )
    if verdict.basis == "modelled":
        tells = ". BF16 was not timed." if watched else ". Run on the GPU to measure."
        return f"{ERROR[:1].upper()}{ERROR[1:]}{tells}"
    if any(_is_modelled(step) for step in report.prescription):
        return f"The savings are estimates; {_seen(watched)}."
    if verdict.status == "no_fp8":
        return f"Yes, for the layers that were found; {_seen(watched)}."
    return f"The speed of FP8 is unknown: {_seen(watched)}."


def _is_modelled(step: Step) -> bool:
    saves = step.saving_ms is not None and step.saving_ms.basis == "modelled"
    return saves or step.treatment.name == STAY_IN_BF16


def _how_sure(view: TrialView) -> str:
    """Say whether the times can be relied on, and are those of a GPU."""
    trial = view.facts.trial
    if timed_on_cpu(view.facts):
        return "Not for a GPU"
    doubtful = copies_differ(trial) or _doubt(trial) or view.host_contention
    return "Not quite" if doubtful else "Yes"


def _range(report: Document) -> str:
    """Write the range of the ratio if its side is sure: (4.1x to 6.5x slower)."""
    verdict = report.verdict
    low, high = verdict.speedup_low, verdict.speedup_high
    if verdict.status not in ("fp8_slower", "fp8_faster") or not low or not high or high / low < WIDE:
        return ""
    slower = verdict.status == "fp8_slower"
    least, most = (1 / high, 1 / low) if slower else (low, high)
    return f" ({in_times(least)} to {in_times(most)} {'slower' if slower else 'faster'})"


def _was_watched(facts: Facts) -> bool:
    return bool(facts.get("observed.steps_ms"))


def _seen(watched: str) -> str:
    return f"{watched} were timed as they ran, BF16 was not" if watched else "nothing was timed"


def _timed(view: TrialView, grave: bool) -> str:
    """Tell how the times were taken, how far they spread, and how well a copy agreed."""
    trial, of, against = view.facts.trial, view.as_is, view.bf16
    compared = [each for each in (of, against) if each is not None]
    if not compared:
        return ""
    spreads = dict.fromkeys(filter(None, map(spread, compared)))
    rounds = max(len(each.get("rounds_ms", ())) for each in compared)
    turns = f" in {plural(rounds, 'round')}" if rounds else ""
    apart = f", {' and '.join(spreads)} ms" if spreads else ""
    both = "Both were timed in turn" if len(compared) == 2 and of is not against else "It was timed"
    if grave or not view.uses_fp8:
        both = "The steps were timed in turn"
    rest = f"{_cut(trial)}{_skips(view.facts)}"
    return f"{both} on {trial.gpu or 'the CPU'}{turns}{apart}; {_copies(trial)}.{rest}"


def _skips(facts: Facts) -> str:
    """Say that steps differ by the layers that the model skips at random."""
    share = facts.get("training.layerdrop")
    return f" LayerDrop skips {percent(100 * share)} of the layers at random: steps differ." if share else ""


def _copies(trial: Trial) -> str:
    """Tell how well a copy agreed, and whether the times can be relied on."""
    alike = self_check_ratio(trial)
    agreed = (
        f"two copies of one step differ by {100 * abs(alike - 1):.1f}%"
        if alike
        else "no step was timed against its own copy"
    )
    if copies_differ(trial):
        return agreed + UNRELIABLE
    doubt = _doubt(trial)
    return f"{agreed}; {doubt}{UNRELIABLE}" if doubt else agreed


def _doubt(trial: Trial) -> str | None:
    """Return why the trial calls its own times unreliable, if it does."""
    return trial.reason if trial.get("reliable") is False else None


def _cut(trial: Trial) -> str:
    whole = trial.get("blocks")
    return " Full depth is extrapolated from fewer blocks." if whole else ""


RESTS_ON = {"measured": "from measured kernel times", "modelled": "estimated from the datasheet"}
"""Basis of the bound -> what it was computed from."""


def limit(facts: Facts, steps: Sequence[Step]) -> str:
    """Write the upper bound; empty if unknown, or if it does not hold for the plan.

    The bound is on the step with the best BF16 as it is. A plan that makes BF16 faster too goes beyond it.
    """
    most = ceiling(facts)
    if most is None or that_help_bf16_too(step.treatment.name for step in steps):
        return ""
    planned, bf16 = arm(facts.trial, ArmName.PRESCRIBED), best_bf16(facts)
    if (
        planned
        and bf16
        and planned.step_ms
        and bf16.step_ms
        and bf16.step_ms / planned.step_ms > most.speedup
    ):
        return ""
    how = RESTS_ON.get(most.basis, most.basis)
    return f"Upper bound: {most.speedup:.2f}x BF16, if every FP8 cast were free ({how})."
