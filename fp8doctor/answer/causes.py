"""Why FP8 is slower: the fault, a wait that FP8 does not shorten, then what the plan fixes or undoes."""

from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.own_step import compiles_any
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.analysis.watched import script_overhead, waiting_first
from fp8doctor.answer.comparison import Comparison
from fp8doctor.answer.items import gains_nothing
from fp8doctor.answer.verdict import Fault
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import COMPILED_BF16
from fp8doctor.finding import Finding


class Cause(Struct, frozen=True):
    """Why FP8 is slower, or what a fix of the plan is for."""

    title: str
    code: str = ""
    name: str = ""
    """Name of the finding; a code may have several."""
    ms: float = 0.0
    """What its fix was timed to save; 0 if it was not."""
    in_fp8: bool = False
    """True if that is a saving in FP8, which the plan leaves."""


def causes(
    view: TrialView,
    findings: Sequence[Finding],
    steps: Sequence[Step],
    fault: Fault | None,
    state: str,
    compared: Comparison,
) -> tuple[Cause, ...]:
    """Name the fault's reason, then a wait that FP8 does not shorten, then what the plan fixes or undoes.

    Next to a fault that a check found nothing matters but what ends the job too. Without any of these, FP8 is
    slower by its form if BF16 alone is compiled.
    """
    found, faults = fault.finding if fault else None, list[Cause]()
    if fault and fault.reason:
        faults = [Cause(fault.reason, *((found.code, found.name) if found else ()))]
    waits = (if_recorded(read, view.facts) for read in (waiting_first, script_overhead))
    told = {found.name} if found else set[str]()
    told |= {each.name for each in findings if state and each.area == "engagement"}
    is_slower = compared.speedup is not None and compared.speedup.side == "slower"
    costs = tuple(_costs(view, findings, steps, told, is_slower=is_slower))
    named = (*faults, *(Cause(each) for each in waits if each), *costs)
    if fault and (found or fault.first):
        ends = {each.name for each in findings if recorded(each, "breaks")}
        ends |= {name for step in steps if fault.status == "not_finite" for name in step.names}
        return (*named[:1], *(each for each in named[1:] if each.name in ends))
    if is_slower and not costs and not fault and _is_compiled_in_bf16_alone(compared, view.facts):
        return (*named, Cause("The best BF16 is compiled, and FP8 as you run it is not"))
    return named


def _costs(
    view: TrialView,
    findings: Sequence[Finding],
    steps: Sequence[Step],
    told: Collection[str],
    *,
    is_slower: bool,
) -> Iterator[Cause]:
    """List what findings explain, without those that are ``told``.

    Causes that end with one fix have its saving together. If FP8 is slower, its own costs come before what
    BF16 has too; else what makes it heavier comes second.
    """
    heavier = {each.name for each in findings if recorded(each, "explains") and not is_slower}
    named = (_cause(each, view) for each in _explaining(view, findings, steps, heavier))
    costs = [each for each in named if each.name not in told]
    of_fp8 = {each.name for each in registry.discover() if each.changes_fp8 and is_slower}
    most_ms = max((each.ms for each in costs), default=0.0)
    costs.sort(key=lambda each: (each.name not in of_fp8 or 0 < each.ms < most_ms, -each.ms))
    costs[1:] = sorted(costs[1:], key=lambda each: each.name not in heavier and not each.ms)
    said = set[float]()
    for each in costs:
        yield replace(each, ms=0.0) if each.ms in said else each
        said.add(each.ms)


def _is_compiled_in_bf16_alone(compared: Comparison, facts: Facts) -> bool:
    fp8, bf16 = compared.fp8, compared.bf16
    both = fp8 and bf16 and fp8.is_as_is and bf16.name in COMPILED_BF16
    return bool(both) and not compiles_any(facts)


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


def _cause(of: Finding | Step, view: TrialView) -> Cause:
    """Name a cause with what its fix was timed to save; in FP8, also if the plan leaves that."""
    saving, name = of.saving_ms, of.names[0] if isinstance(of, Step) else of.name
    in_fp8 = view.gives_up_fp8 and isinstance(of, Step)
    if in_fp8 and of.treatment:
        saving = view.savings.get(of.treatment.name)
    if isinstance(of, Step) and of.together:
        saving = None  # it is that of other fixes too
    timed = saving is not None and saving.basis == "measured" and saving.from_ms is not None
    saved_ms = saving.middle if saving and timed and saving.low > 0 else 0.0
    return Cause(of.title, of.code, name, saved_ms, in_fp8)
