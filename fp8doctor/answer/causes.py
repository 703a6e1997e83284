"""Why FP8 is slower: the fault, a wait that FP8 does not shorten, then what the plan fixes or undoes."""

from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct

from fp8doctor import registry
from fp8doctor.analysis.significance import Number
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import script_overhead, waiting_first
from fp8doctor.answer.faults import Fault
from fp8doctor.answer.items import gains_nothing
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import if_recorded
from fp8doctor.finding import Finding

HEAVIER = "extra_gib"  # evidence that FP8 takes more memory than BF16, which explains no time


class Cause(Struct, frozen=True):
    """Why FP8 is slower, or what a fix of the plan is for."""

    title: str
    code: str = ""
    name: str = ""
    """Name of the finding; a code may have several."""


def causes(
    view: TrialView,
    findings: Sequence[Finding],
    steps: Sequence[Step],
    fault: Fault | None,
    state: str,
    speedup: Number | None,
) -> Iterator[Cause]:
    """Name the fault's reason, then a wait that FP8 does not shorten, then what the plan fixes or undoes.

    If FP8 is slower, its own costs come before what BF16 has too; else what makes it heavier comes second.
    """
    found = fault.finding if fault else None
    if fault and fault.reason:
        yield Cause(fault.reason, *((found.code, found.name) if found else ()))
    waits = (if_recorded(read, view.facts) for read in (waiting_first, script_overhead))
    yield from (Cause(each) for each in waits if each)
    told = {found.name} if found else set[str]()
    told |= {each.name for each in findings if state and each.area == "engagement"}
    is_slower = speedup is not None and speedup.side == "slower"
    heavier = {each.name for each in findings if HEAVIER in each.evidence and not is_slower}
    costs = list[tuple[Cause, float]]()
    for each in _explaining(view, findings, steps, heavier):
        name = each.names[0] if isinstance(each, Step) else each.name
        costs += [(Cause(each.title, each.code, name), _saved_ms(each, view))] if name not in told else []
    of_fp8 = {each.name for each in registry.discover() if each.changes_fp8 and is_slower}
    most_ms = max((ms for _, ms in costs), default=0.0)
    costs.sort(key=lambda of: (of[0].name not in of_fp8 or 0 < of[1] < most_ms, -of[1]))
    costs[1:] = sorted(costs[1:], key=lambda of: of[0].name not in heavier and not of[1])
    yield from (each for each, _ in costs)


def _explaining(
    view: TrialView, findings: Sequence[Finding], steps: Sequence[Step], heavier: Collection[str]
) -> Iterator[Finding | Step]:
    """List what the plan fixes, then what it undoes by leaving FP8 off, then what no fix is for."""
    yield from (step for step in steps if step.code and step.treatment.name != STAY_IN_BF16)
    seeks = view.speedup is None or view.speedup.side != "faster"
    undone = {name for step in steps if step.treatment.name == STAY_IN_BF16 for name in step.names}
    fixed = {name for step in steps for name in step.names}
    known = {each.code for each in findings if each.severity != "info"}
    for each in sorted(findings, key=lambda each: each.name not in undone):
        if gains_nothing(each) or known.intersection(each.caused_by):
            continue
        of_time = each.severity != "info" and (each.area != "memory" or each.saving_ms is not None)
        is_left = each.name not in fixed and (each.name in heavier or (seeks and of_time))
        if is_left or (of_time and each.name in undone):
            yield each


def _saved_ms(of: Finding | Step, view: TrialView) -> float:
    """Read what a cause's fix was timed to save, in FP8 if the plan leaves that; 0 if it was not."""
    saving = of.saving_ms
    if view.gives_up_fp8 and isinstance(of, Step):
        saving = view.savings.get(of.treatment.name)
    if isinstance(of, Step) and of.together:
        saving = None  # it is that of other fixes too
    timed = saving is not None and saving.basis == "measured" and saving.from_ms is not None
    return saving.middle if saving and timed and saving.low > 0 else 0.0
