"""The answer of a report: what comes before speed, the steps compared, causes, fixes, and what is open."""

from collections.abc import Sequence

from msgspec.structs import replace

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import trains_in_16_bits
from fp8doctor.analysis.layers import nothing_to_convert, tokens_of, waits_for_linears
from fp8doctor.analysis.memory import fit
from fp8doctor.analysis.recipe_support import assumed_gpus, visible_gpus
from fp8doctor.analysis.recipe_support import has_fp8 as has_fp8_cores
from fp8doctor.analysis.significance import Side
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import timed_alone, whole_speedup
from fp8doctor.answer.causes import causes
from fp8doctor.answer.comparison import Comparison, comparison, with_its_gain
from fp8doctor.answer.items import items
from fp8doctor.answer.open_questions import doubts_of, open_questions, timed, unchecked, why_unknown
from fp8doctor.answer.record import Answer
from fp8doctor.answer.steps import timed_steps
from fp8doctor.answer.verdict import Fault, Status, Verdict, fault_of, without_fp8
from fp8doctor.cost.matmuls import micro_batches
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.finding import Finding, Outcome
from fp8doctor.recipes import low_precision

MOST_CAUSES = 2
"""Causes that are named; of a fault that a check found its reason alone."""

SIDES: dict[Side, Status] = {
    "slower": "fp8_slower",
    "even": "fp8_even",
    "faster": "fp8_faster",
    "open": "open",
}


def answer(
    view: TrialView,
    findings: Sequence[Finding],
    steps: Sequence[Step],
    outcomes: Sequence[Outcome],
    expected: Expected,
) -> Answer:
    """Answer for a job whose plan is ``steps`` and whose user wants to see ``findings``."""
    facts = view.facts
    known = recorded(facts, "network")
    compared = comparison(view, expected, steps) if known else Comparison()
    steps, speedup = with_its_gain(steps, compared), compared.speedup
    fault = fault_of(facts, findings) or (None if speedup else _error(findings))
    has_fp8 = bool(known and if_recorded(uses_fp8, facts))
    state, is_unclear = (if_recorded(without_fp8, facts) if known else None) or ("", False)
    if fault:
        status = fault.status
    elif is_unclear:
        status = "open"
    else:
        status = SIDES[speedup.side if speedup else "open"] if has_fp8 else "no_fp8"
    named = causes(view, findings, steps, fault, state, compared)[:MOST_CAUSES]
    bf16_ms = compared.bf16.ms.value if compared.bf16 else None
    memory = if_recorded(fit, facts) if known else None
    said = Answer(
        status=status,
        has_fp8=has_fp8,
        compared=compared,
        low_precision=low_precision(facts.linears()),
        fault=fault,
        state=state,
        causes=named,
        fixes=tuple(steps),
        items=tuple(items(view, findings, steps, {each.name for each in named})),
        memory=memory,
        whole=if_recorded(whole_speedup, facts, speedup, bf16_ms, has_fp8=has_fp8),
        is_compute=view.on_gpu and bool(if_recorded(timed_alone, facts)),
        doubts=tuple(doubts_of(view)) if view.on_gpu else (),
        unknown="" if speedup or fault or state or not known else why_unknown(view, expected, compared.after),
        takes_no_fp8=known and not has_fp8 and _takes_no_fp8(view),
        is_decided=view.is_decided,
        steps=if_recorded(timed_steps, view),
        is_cut=bool(view.table and facts.get("trial.blocks")),
        unchecked=unchecked(outcomes) if speedup and speedup.basis != "measured" else (),
    )
    said = replace(said, open=open_questions(view, said)) if known else said
    return replace(said, times_it=timed(facts) or "") if said.basis == "modelled" and not said.open else said


def _error(findings: Sequence[Finding]) -> Fault | None:
    """Make a fault of the first error, for a job whose speed is unknown."""
    found = next((each for each in findings if each.severity == "error"), None)
    if found is None:
        return None
    return Fault("open", found.title.rstrip("."), found.explanation.partition(". ")[0].rstrip("."), found)


def _takes_no_fp8(view: TrialView) -> bool:
    """Return whether no conversion gives this model FP8: for its layers, its library or its GPU."""
    facts = view.facts
    gpus = if_recorded(assumed_gpus, facts) or visible_gpus(facts)
    return bool(
        if_recorded(nothing_to_convert, facts.network)
        or (view.takes_no_conversion and not if_recorded(waits_for_linears, facts))
        or if_recorded(trains_in_16_bits, facts)
        or (gpus and not any(if_recorded(has_fp8_cores, each) for each in gpus))
    )


def verdict(said: Answer, facts: Facts, summary: str) -> Verdict:
    """Write the answer as the JSON has it; `speedup` is of the step as it is. All times are of one clock."""
    compared, speedup = said.compared, said.speedup
    now, bf16, end = compared.now, compared.bf16, compared.end
    of_fp8 = speedup if said.has_fp8 else None
    estimated = of_fp8 is not None and of_fp8.basis != "measured" and not compared.after
    gives = compared.end_speedup or (None if said.has_fp8 else speedup)
    low, high = said.whole or (None, None)
    own_ms = now.ms.value if now and now.ms.basis == "measured" else None
    tokens = if_recorded(tokens_of, facts)
    return Verdict(
        status=said.status,
        summary=summary,
        speedup=of_fp8.value if of_fp8 and of_fp8.side != "open" and not of_fp8.has_open_size else None,
        speedup_low=of_fp8.low if of_fp8 else None,
        speedup_high=of_fp8.high if of_fp8 else None,
        basis=said.basis,
        achievable_speedup=gives.value if gives and (gives.side != "open" or own_ms is None) else None,
        estimated_speedup=of_fp8.value if of_fp8 and estimated else None,
        step_ms=own_ms,
        bf16_step_ms=bf16.ms.value if bf16 and bf16.ms.basis == "measured" else None,
        best_step_ms=end.ms.value if end else None,
        best_variant=end.name if end else None,
        best_basis=end.ms.basis if end else None,
        tokens_per_s=1e3 * tokens * micro_batches(facts) / own_ms if own_ms and tokens else None,
        whole_step_low=low or None,
        whole_step_high=high,
        open=said.open,
    )
