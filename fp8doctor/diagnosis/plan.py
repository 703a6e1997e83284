"""The plan: which changes, in which order, and what each saves.

It leads to the simplest of the fastest timed variants. Untimed, the fixes stay unless FP8 surely loses."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from fp8doctor import registry
from fp8doctor.analysis.arms import Variant, uses_fp8
from fp8doctor.analysis.conversion import conversion, keep_in_bf16, with_recipe
from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import (
    BASE_FIRST,
    KEEP_IN_BF16,
    ON_THIS_GPU,
    STAY_IN_BF16,
    after,
    changes_recipe,
    recipe_after,
    traits,
)
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.answer.verdict import invalidates
from fp8doctor.areas import SEVERITIES
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.estimate import Expected, changes_fp8, changes_fp8_alone, fixed_checks
from fp8doctor.diagnosis.fitting import fitted, within_memory
from fp8doctor.diagnosis.savings import on_the_way
from fp8doctor.diagnosis.start import start_timed, unasked, with_a_start
from fp8doctor.diagnosis.treatments import (
    describe,
    replaces_own_compile,
    stay_in_bf16,
)
from fp8doctor.facts import NOT_RECORDED, ArmName, Facts, if_recorded, recorded
from fp8doctor.finding import Finding
from fp8doctor.wording import in_times

COMPILATION = "compilation"
"""A family of treatments, and the area of the checks of torch.compile."""


def make_plan(view: TrialView, findings: Sequence[Finding], expected: Expected) -> tuple[Step, ...]:
    """Choose the changes that ``findings`` propose, by times and by what is ``expected``; order them."""
    proposed = within_memory(prescribe(findings, view.facts), view.facts)
    asked = next((step for step in proposed if step.treatment.name == STAY_IN_BF16), None)
    others = [step for step in proposed if step is not asked]
    broken = frozenset(each.name for each in findings if recorded(each, "breaks"))
    if view.end is not None:
        chosen = if_recorded(_to_the_end, view.end, others, asked, view, broken)
    else:
        chosen = if_recorded(_untimed, others, asked, expected, broken)
    steps = proposed if chosen is None else chosen
    steps = if_recorded(with_a_start, steps, view, expected) or steps
    needed = _in_one_conversion(_needed(steps, view.facts), view.facts)
    return tuple(fitted([*_headed(needed, findings)], view.facts))


def _needed(steps: Sequence[Step], facts: Facts) -> Sequence[Step]:
    """Let a step fix what it ends of an untimed one, whose checks find nothing more once it is made."""

    def is_timed(step: Step) -> bool:
        return step.saving_ms is not None and step.saving_ms.basis == "measured"

    def ends(by: Step, step: Step) -> bool:
        if by is step or is_timed(step) or not step.names or traits(by.treatment.name).for_fp8:
            return False
        then = if_recorded(after, facts, [by.treatment]) or facts
        _, outcomes = registry.run(fixed_checks(step) if then is not facts else (), then)
        return bool(outcomes) and all(each.outcome in ENDED for each in outcomes)

    for step in steps:
        by = next((each for each in steps if ends(each, step)), None)
        if by is not None:
            savings = [each.saving_ms for each in (by, step) if each.saving_ms]
            most = by.saving_ms if is_timed(by) else max(savings, key=lambda each: each.middle, default=None)
            both = replace(_fixing_too(by, [step]), saving_ms=most)
            return _needed([both if each is by else each for each in steps if each is not step], facts)
    return steps


ENDED = ("silent", "not_applicable")
"""Outcomes of a check that finds nothing."""


def converts_layers(name: str) -> bool:
    """Return whether a fix writes the lines of a conversion: those of torchao, with a filter or a recipe."""
    return name.startswith("convert-") or name == KEEP_IN_BF16 or changes_recipe(name)


def _in_one_conversion(steps: Sequence[Step], facts: Facts) -> Sequence[Step]:
    """Convert once, and first: another recipe of torchao and a filter go into the same lines."""
    at = next((at for at, step in enumerate(steps) if traits(step.treatment.name).compiles), len(steps))
    late = [step for step in steps[at:] if converts_layers(step.treatment.name)]
    steps = [*steps[:at], *late, *(step for step in steps[at:] if step not in late)]
    named = {step.treatment.name: step.treatment for step in steps}
    made = [each for each in named if each in (KEEP_IN_BF16, BASE_FIRST) or changes_recipe(each)]
    if len(made) < 2:
        return steps
    out = [layer for name in made for layer in named[name].layers]
    word = next((recipe_after(name) for name in made if changes_recipe(name)), "")
    code = with_recipe(word, facts, out) if word else conversion(facts, out)
    one = {name: replace(named[name], code=code) for name in made}
    return [replace(each, treatment=one.get(each.treatment.name, each.treatment)) for each in steps]


TRAINS_WRONGLY = ("environment", "numerics")
"""Areas of checks whose findings are about right results before they are about speed."""


def prescribe(findings: Iterable[Finding], facts: Facts | None = None) -> tuple[Step, ...]:
    """Rank the treatments of ``findings``; those with the same treatment become one step.

    Breakage comes first, then obstacles to FP8, then what makes the step another than it seems, then what may
    train wrongly, then ms saved, then severity. To give FP8 up comes last: it is measured against FP8 with
    all other steps. A symptom whose cause was found as more than information is dropped, information that
    saves nothing, and what frees memory alone.
    """
    findings = tuple(findings)
    found = {finding.code for finding in findings if finding.severity != "info"}
    steps: dict[str, list[Finding]] = {}
    for finding in findings:
        saving = finding.saving_ms
        may_save = saving is not None and (saving.low if saving.basis == "measured" else saving.high) > 0
        if (
            finding.treatment is not None
            and not traits(finding.treatment.name).for_memory
            and not found.intersection(finding.caused_by)
            and (may_save or finding.severity != "info")
        ):
            steps.setdefault(finding.treatment.name, []).append(finding)
    ranked = sorted((sorted(group, key=_rank) for group in steps.values()), key=lambda each: _rank(each[0]))
    return tuple(_step_of(group, facts) for group in ranked)


def _rank(finding: Finding) -> tuple[object, ...]:
    gives_up = finding.treatment is not None and finding.treatment.name == STAY_IN_BF16
    wrong = finding.area in TRAINS_WRONGLY and finding.severity != "info"
    urgent = recorded(finding, "breaks"), finding.severity == "error", invalidates(finding), wrong
    saved = finding.saving_ms.middle if finding.saving_ms else 0.0
    severity = SEVERITIES.index(finding.severity or "info")
    return gives_up, *(not each for each in urgent), -saved, -severity, finding.code


def _step_of(group: list[Finding], facts: Facts | None) -> Step:
    """Make the step of findings with one treatment, for the layers of all of them."""
    worst = group[0]
    treatment = worst.treatment
    assert treatment is not None
    every = (layer for each in group if each.treatment for layer in each.treatment.layers)
    layers = tuple(dict.fromkeys(every))
    if set(layers) != set(treatment.layers):
        in_bf16 = treatment.name == KEEP_IN_BF16
        treatment = keep_in_bf16(layers, facts) if in_bf16 else replace(treatment, layers=layers)
    return Step(
        code=worst.code,
        mends=tuple(dict.fromkeys(each.code for each in group)),
        names=tuple(each.name for each in group),
        title=worst.title,
        treatment=treatment,
        saving_ms=worst.saving_ms,
    )


def _fixing_too(step: Step, others: Iterable[Step]) -> Step:
    """Let a step fix what others were for."""
    every = (step, *others)
    mends = dict.fromkeys(code for each in every for code in each.mends)
    names = dict.fromkeys(name for each in every for name in each.names)
    return replace(step, mends=tuple(mends), names=tuple(names))


def _untimed(
    proposed: Sequence[Step],
    gives_up: Step | None,
    expected: Expected,
    broken: frozenset[str],
) -> tuple[Step, ...]:
    """Keep what the findings propose, or leave FP8 off if it loses with all of that by the cost model."""
    facts = expected.facts
    others = [*_needed(proposed, facts)]
    expects = if_recorded(expected.planned, others)
    if expects and expects.loses:
        if not gives_up and (uses_fp8(facts) or fp8_was_asked_for(facts) or any(map(changes_fp8, others))):
            title = f"FP8 would run at {expects.best.value:.2f}x the speed of BF16"
            times = f"{in_times(1 / expects.best.value)} " * uses_fp8(facts)  # else the verdict says it
            slower = stay_in_bf16(facts, f"{'even fixed, ' * bool(others)}FP8 is {times}slower (estimated)")
            gives_up = unasked(f"{title} (estimated for {expects.gpu})", slower)
    elif (
        gives_up
        and (expects or all(each.severity != "error" for each in expected.findings))
        and uses_fp8(facts)
    ):
        gives_up = None  # its speed is open: the estimate's range holds 1, or there is none
    not_here = ON_THIS_GPU.values()  # the GPU has no FP8
    gives_up = gives_up or next((each for each in others if each.treatment.name in not_here), None)
    if gives_up:
        others = [step for step in others if step is not gives_up]
        others, gives_up = _without_fp8(others, gives_up, broken)
    mends = [step for step in others if broken.intersection(step.names)]
    rest = (step for step in others if step not in mends)
    return (*mends, *([gives_up] if gives_up else []), *rest)


def _without_fp8(
    others: Sequence[Step], gives_up: Step, broken: frozenset[str], *, recompiles: bool = False
) -> tuple[list[Step], Step]:
    """Drop the steps that leaving FP8 off undoes: changes of FP8, and other ways to compile.

    It fixes all their findings. Breakage that is not of FP8 alone stays.
    """

    def is_undone(step: Step) -> bool:
        compiles = traits(step.treatment.name).family == COMPILATION
        compiles |= recompiles and any(check.area == COMPILATION for check in fixed_checks(step))
        fp8 = changes_fp8(step) and not traits(step.treatment.name).helps_bf16_too
        return changes_fp8_alone(step) or (not broken.intersection(step.names) and (compiles or fp8))

    undone = [step for step in others if is_undone(step)]
    return [step for step in others if step not in undone], _fixing_too(gives_up, undone)


def _headed(steps: Iterable[Step], findings: Sequence[Finding]) -> Iterator[Step]:
    """Head what leaves FP8 off by the gravest that it ends: breakage, an error, what trained wrongly.

    Without any by the finding that proposed it, else by the first that it ends.
    """
    by_name = {each.name: each for each in findings}
    for step in steps:
        ended = [by_name[name] for name in step.names if name in by_name]
        grave = [
            each
            for each in ended
            if recorded(each, "breaks") or each.severity == "error" or each.area in TRAINS_WRONGLY
        ]
        head = min(grave, key=_rank, default=None if step.code else next(iter(ended), None))
        if step.treatment.name == STAY_IN_BF16 and head:
            names, ends = dict.fromkeys((head.name, *step.names)), head.get("breaks", NOT_RECORDED)
            step = replace(step, code=head.code, title=head.title, names=tuple(names), breaks=ends)
        yield step


def _to_the_end(
    end: Variant, proposed: Sequence[Step], asked: Step | None, view: TrialView, broken: frozenset[str]
) -> tuple[Step, ...]:
    """List breakage first, then the changes that make the plan's end, then what no variant tried."""

    def begins_fp8(step: Step) -> bool:
        """Return whether FP8 was asked for, did not begin, and would by this step."""
        return not view.uses_fp8 and changes_fp8(step)

    kept, first = _kept(end, proposed, view, broken), list[Step]()
    little = view.bound is not None and view.bound < 1 + EVEN and not end.in_fp8
    if view.gives_up_fp8 or (little and any(map(begins_fp8, kept))):
        treatment = stay_in_bf16(view.facts, for_now=view.fp8_is_undecided)
        gives_up = asked or unasked("No FP8 that was timed is faster than BF16 for sure", treatment)
        gives_up = replace(gives_up, treatment=treatment, saving_ms=None)
        recompiles = replaces_own_compile(end.name, view.facts)
        left, gives_up = _without_fp8(proposed, gives_up, broken, recompiles=recompiles)  # timed or not
        kept, first = [step for step in kept if step in left], [gives_up]
    elif not view.uses_fp8 and not end.is_as_is:
        by_name = {step.treatment.name: step for step in kept}
        first = [
            replace(by_name.pop(each.treatment.name, each), treatment=each.treatment)
            for each in start_timed(end, view)
        ]
        kept = [*by_name.values()]
    mends = [step for step in kept if broken.intersection(step.names) or begins_fp8(step)]
    named = {step.treatment.name for step in (*kept, *first)}
    missing = (describe(name, view.facts) for name in end.changes if name not in named)
    found = [
        unasked(f"{each.name} is a part of the fastest step that was timed", each) for each in missing if each
    ]
    parts = [step for step in kept if step.treatment.name in end.changes and step not in mends]
    rest = [step for step in kept if step not in mends and step not in parts]
    return on_the_way(view, [*mends, *first, *parts, *found, *rest], broken)


def _kept(end: Variant, proposed: Iterable[Step], view: TrialView, broken: frozenset[str]) -> list[Step]:
    """Drop what was timed and is no part of the plan's end, unless it is about more than speed."""
    rows = [each.arm for each in view.timed.values() if view.base_of(each)]
    prescribed = [each for each in view.trial.arms if each.name == ArmName.PRESCRIBED]
    rows += [each for each in prescribed if each.get("treatments", ()) in view.too_large]
    dropped = {name for each in rows for name in each.get("treatments", ())} - {*end.changes}

    def is_dropped(step: Step) -> bool:
        name = step.treatment.name
        return name in dropped or (view.gives_up_fp8 and traits(name).for_fp8 and name not in end.changes)

    return [
        step
        for step in proposed
        if not is_dropped(step)
        or broken.intersection(step.names)
        or any(check.area == "numerics" for check in fixed_checks(step))
    ]
