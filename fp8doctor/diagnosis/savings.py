"""Savings that the trial measured: of a change alone, and of each fix on the way to the plan's end."""

from collections.abc import Collection, Iterable, Sequence

from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.arms import Variant
from fp8doctor.analysis.modelled_fix import modelled_steps
from fp8doctor.analysis.step_difference import SHOWN_MS
from fp8doctor.analysis.treatment_table import COMPILE_BLOCKS, STAY_IN_BF16, family, traits
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import as_it_runs
from fp8doctor.facts import Facts, if_recorded
from fp8doctor.facts.arm_names import ArmName, is_in_bf16
from fp8doctor.finding import Finding, Outcome, Saving
from fp8doctor.wording import minus


def run(catalogue: Iterable[registry.Check], facts: Facts) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Run checks, and give each finding without a saving the one that the cost model has for its fix.

    A rule that is information alone is about more than time.
    """
    findings, outcomes = registry.run(catalogue, facts)
    job, _ = if_recorded(as_it_runs, facts, findings) or (None, ())

    def priced(finding: Finding) -> Finding:
        check, fix = registry.check_of(finding), finding.treatment
        if fix is None or finding.saving_ms is not None or (check and check.severity == "info"):
            return finding
        steps = if_recorded(modelled_steps, job, fix) if job else None
        saving = steps.saving if steps else None
        return replace(finding, saving_ms=saving) if saving and saving.high >= SHOWN_MS else finding

    return tuple(map(priced, findings)), outcomes


def with_measured_savings(
    view: TrialView, findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Return the findings with savings that a GPU measured, refuted ones marked.

    A variant must have carried out the treatment alone. A refuted finding keeps its saving, zero or negative,
    and becomes information. If the treatment needs too much memory, its finding stays and says so.
    """
    if not view.on_gpu:
        return tuple(findings), tuple(outcomes)
    weighed, refuted = [], {}
    for finding in (_without_too_large(view, each) for each in findings):
        saved, treatment = if_recorded(_saved_alone, view, finding), finding.treatment
        if saved is not None and treatment:
            finding = replace(finding, saving_ms=saved)
            if saved.high <= 0:
                finding = replace(finding, severity="info")
                costs = f"costs {-saved.middle:,.1f} ms/step instead of saving"
                refuted[finding.code] = f"measured: {treatment.name} {costs}"
        weighed.append(finding)
    judged = (
        replace(each, outcome="refuted", reason=refuted[each.code]) if each.code in refuted else each
        for each in outcomes
    )
    return tuple(weighed), tuple(judged)


def _without_too_large(view: TrialView, finding: Finding) -> Finding:
    treatment = finding.treatment
    found = view.too_large.get((treatment.name,)) if treatment else None
    if treatment is None or found is None:
        return finding
    why = f"A fix for it, {treatment.summary}, is not in the plan: {found.reason}."
    return replace(finding, explanation=f"{finding.explanation} {why}", treatment=None, saving_ms=None)


def _saved_alone(view: TrialView, finding: Finding) -> Saving | None:
    """Return a finding's saving as timed with only its treatment; else None.

    A finding of a measured check brings its own. No time alone refutes a part of the plan's end, and none in
    FP8 counts for what helps BF16 too if the plan leaves FP8 off.
    """
    if finding.treatment is None or (finding.saving_ms is not None and finding.saving_ms.basis == "measured"):
        return None
    name, end = finding.treatment.name, view.end
    if name == STAY_IN_BF16:
        fp8 = view.fp8 if view.uses_fp8 else None
        return view.saving(fp8, view.bf16) if fp8 and view.bf16 else None
    alone = view.savings.get(name)
    if view.gives_up_fp8 and traits(name).helps_bf16_too:
        return None
    return None if alone and alone.high <= 0 and end and name in end.changes else alone


Link = tuple[Variant, Variant, frozenset[str]]
"""A part of the way from the step as it is to the plan's end, and the treatments that make it together."""


def on_the_way(view: TrialView, plan: Sequence[Step], broken: frozenset[str]) -> tuple[Step, ...]:
    """Give each fix its saving on the way to the plan's end, in the order of that way after ``broken``.

    These savings add up to the plan's. A fix that is no part of the way, or shares it with a change that no
    fix makes, keeps no saving but an estimate.
    """
    links = way(view)
    if not links:
        return tuple(plan)
    part = {name: number for number, (_, _, made) in enumerate(links) for name in made}
    place = {step.treatment.name: part.get(_kind(step.treatment.name, view)) for step in plan}
    free = [
        step
        for step in plan
        if place[step.treatment.name] is not None and view.uses_fp8 and not broken.intersection(step.names)
    ]
    in_order = iter(sorted(free, key=lambda step: place[step.treatment.name] or 0))
    steps = tuple(next(in_order) if step in free else step for step in plan)
    for number, (before, after, made) in enumerate(links):
        names = [name for name, of in place.items() if of == number]
        if len(names) < len(made):
            place |= dict.fromkeys(names)
            continue
        untimed = STAY_IN_BF16 in made and view.own_bf16_left_out is not None
        steps = together(steps, names, None if untimed else view.saving(before, after))
    aside = {name for name in view.savings if place.get(name) is None}
    return tuple(replace(step, saving_ms=None) if step.treatment.name in aside else step for step in steps)


def together(steps: Iterable[Step], names: Collection[str], saving: Saving | None) -> tuple[Step, ...]:
    """Give the fixes of these names one saving together: the first of them has it."""
    steps = tuple(steps)
    shared = [step.treatment.name for step in steps if step.treatment.name in names]
    return tuple(
        replace(
            step,
            saving_ms=saving if step.treatment.name == shared[0] else None,
            together=tuple(name for name in shared if name != step.treatment.name),
        )
        if step.treatment.name in names
        else step
        for step in steps
    )


def way(view: TrialView) -> list[Link]:
    """Lead from the step as it is to the plan's end over timed variants, each faster than the last.

    The largest gain comes first, but leaving FP8 off before all that BF16 gains from. A change that does not
    gain by itself for sure shares a link with the next.
    """
    now, done, end = view.as_is, frozenset[str](), view.end
    stops = [(made, each) for each in view.timed.values() if (made := _made(view, each))]
    whole = next((made for made, each in stops if each is end), done)
    first = whole & {STAY_IN_BF16}
    links: list[Link] = []
    while now is not None and end is not None and done < whole:
        nearer = [
            (made, each)
            for made, each in stops
            if done < made < whole
            and first <= made
            and view.saving(now, each).low > 0
            and minus(each.ms.value, end.ms.value) > 0
            and (each.is_finite or not end.is_finite)
        ]
        made, after = min(nearer, key=lambda stop: (len(stop[0]), stop[1].ms.value), default=(whole, end))
        links.append((now, after, made - done))
        now, done = after, made
    return links


def _kind(name: str, view: TrialView) -> str:
    """Name a treatment as `Link` does: without FP8, a baseline is the job compiled, in any way."""
    compiles = traits(name).compiles or name == STAY_IN_BF16
    return family(COMPILE_BLOCKS) if compiles and not view.uses_fp8 else name


def _made(view: TrialView, of: Variant) -> frozenset[str]:
    """Name what makes a variant of the step as it is; empty if no plan leads through it."""
    if of.name == ArmName.WITHOUT_ADAPTERS:
        return frozenset()
    if not is_in_bf16(of.name):
        return frozenset(_kind(name, view) for name in of.changes)
    bf16 = view.bf16_of_the_plan
    if bf16 is None or (of is not bf16 and not (of.changes and view.form_of(of) is bf16)):
        return frozenset()
    return frozenset((*of.changes, _kind(STAY_IN_BF16, view)))
