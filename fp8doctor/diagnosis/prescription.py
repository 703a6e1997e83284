"""Findings to a plan: which changes, in which order, as the trial timed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from fp8doctor import registry
from fp8doctor.analysis.arms import base_of, ratio, saved_ms, timed_a_model
from fp8doctor.analysis.compile_coverage import compile_treatment
from fp8doctor.analysis.layer_gain import timed_shapes
from fp8doctor.analysis.layers import may_be_taken, would_be_converted
from fp8doctor.analysis.module_names import has_lora, names_in_python
from fp8doctor.analysis.significance import EVEN
from fp8doctor.analysis.treatment_table import (
    COMPILE_LAYERS,
    CONVERT_BASE_FIRST,
    KEEP_IN_BF16,
    ON_THIS_GPU,
    STAY_IN_BF16,
    traits,
)
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.areas import SEVERITIES
from fp8doctor.code_snippets import settings
from fp8doctor.diagnosis.document import Step
from fp8doctor.diagnosis.treatments import (
    describe,
    fastest_bf16,
    keep,
    keep_in_bf16,
    nothing_helps,
    replaces_own_compile,
    stay_in_bf16,
)
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName, in_any_window, keeps_users_compilation, recipe_of
from fp8doctor.finding import Finding, Saving, Treatment

COMPILATION = "compilation"
"""A family of treatments, and the area of the checks of torch.compile."""

CONVERTS = "convert"
"""First words of treatments after which other layers may be in FP8."""


def prescribe(findings: Iterable[Finding], facts: Facts | None = None) -> tuple[Step, ...]:
    """Rank the treatments of ``findings``.

    Breakage comes first, then obstacles to FP8, then ms saved, then severity. To give FP8 up comes last: it
    is measured against FP8 with all other steps. A symptom whose cause was found as more than information is
    dropped, and so is information that saves nothing for sure. Findings with the same treatment become one
    step.
    """
    findings = tuple(findings)
    found = {finding.code for finding in findings if finding.severity != "info"}
    steps: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.treatment is None or found.intersection(finding.caused_by):
            continue
        if finding.severity == "info" and not _may_save(finding.saving_ms):
            continue
        steps.setdefault(finding.treatment.name, []).append(finding)
    ranked = sorted(steps.values(), key=lambda group: min(map(_rank, group)))
    return tuple(_step_of(sorted(group, key=_rank), facts) for group in ranked)


def in_agreement(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Drop lines that set a variable differently from an earlier step."""
    said: dict[str, str | None] = {}
    kept = []
    for step in steps:
        lines = step.treatment.code.splitlines()
        agree = [line for line in lines if _agrees(line, said)]
        if len(agree) < len(lines):
            if all(line.lstrip().startswith("#") for line in agree):
                continue
            step = msgspec.structs.replace(
                step, treatment=msgspec.structs.replace(step.treatment, code="\n".join(agree))
            )
        for line in agree:
            said |= settings(line)
        kept.append(step)
    return tuple(kept)


def _agrees(line: str, said: Mapping[str, str | None]) -> bool:
    return all(name not in said or said[name] == value for name, value in settings(line).items())


def _may_save(saving: Saving | None) -> bool:
    """Return whether information promises milliseconds that its timing must confirm."""
    return saving is not None and (saving.low if saving.basis == "measured" else saving.high) > 0


def _rank(finding: Finding) -> tuple[bool, bool, bool, float, int, str]:
    gives_up = finding.treatment is not None and finding.treatment.name == STAY_IN_BF16
    blocks_fp8 = finding.severity == "error"
    saved = finding.saving_ms.middle if finding.saving_ms else 0.0
    severity = SEVERITIES.index(finding.severity or "info")
    return gives_up, not recorded(finding, "breaks"), not blocks_fp8, -saved, -severity, finding.code


def _step_of(group: list[Finding], facts: Facts | None) -> Step:
    worst = group[0]
    assert worst.treatment is not None
    return Step(
        code=worst.code,
        mends=tuple(finding.code for finding in group),
        title=worst.title,
        treatment=_for_all(worst.treatment, group, facts),
        saving_ms=worst.saving_ms,
    )


def _for_all(treatment: Treatment, group: list[Finding], facts: Facts | None) -> Treatment:
    """Return the treatment with the layers of every finding that names it."""
    layers = tuple(
        dict.fromkeys(layer for finding in group if finding.treatment for layer in finding.treatment.layers)
    )
    if set(layers) == set(treatment.layers):
        return treatment
    return (
        if_recorded(keep_in_bf16, layers, facts) or keep_in_bf16(layers)
        if treatment.name == KEEP_IN_BF16
        else msgspec.structs.replace(treatment, layers=layers)
    )


def as_timed(
    proposed: Sequence[Step], view: TrialView, broken: frozenset[str] = frozenset()
) -> tuple[Step, ...]:
    """Return the proposed steps as far as the trial confirms them.

    Without a trial they stay, but never both a fix of FP8 and giving it up. Once a prescription was timed,
    the steps are its parts, and those that no variant carried out. If FP8 stays slower than BF16 beyond
    doubt, or was timed with all of these steps and is slower, the last step gives it up. If no GPU timed
    anything and no FP8 layer can gain, the first one does, and the others are dropped.
    """
    facts = view.facts
    steps = _of_the_total(proposed, view) if view.on_gpu else list(proposed)
    without_fp8 = set(ON_THIS_GPU.values())
    if any(step.treatment.name in without_fp8 and broken.intersection(step.mends) for step in steps):
        return tuple(step for step in steps if step.treatment.name in without_fp8 or not _changes_fp8(step))
    named = {step.treatment.name for step in steps}
    steps += [step for step in conversion(view) if step.treatment.name not in named]
    if not view.on_gpu:
        steps = _by_the_filter({step.treatment.name: step for step in _while_in_fp8(steps, facts)}, facts)
    others = [step for step in steps if step.treatment.name != STAY_IN_BF16]
    saved = view.bf16_stays_faster_by or (view.bf16_saves if _whole_plan_was_timed(others, view) else None)
    gives_up = [step for step in steps if step.treatment.name == STAY_IN_BF16]
    if saved is not None:
        gives_up = gives_up or [
            Step(
                code="",
                mends=(),
                title="FP8 stays slower than BF16 with everything that was tried"
                if view.all_fp8_loses
                else "No FP8 that was timed is faster than BF16 for sure",
                treatment=stay_in_bf16(facts, f"{nothing_helps(view.all_fp8_loses)} here"),
                saving_ms=view.saving(saved),
            )
        ]
    elif not view.on_gpu:
        mends = [step for step in others if broken.intersection(step.mends)]
        rest = [step for step in others if not gives_up or not _changes_fp8(step)]
        return (*mends, *gives_up, *(step for step in rest if step not in mends))
    elif view.prescribed is not None or any(map(_changes_fp8, others)):
        gives_up = []
    if gives_up:
        bf16 = fastest_bf16(facts)
        recompiles = bf16 is not None and replaces_own_compile(bf16, facts)
        others, gives_up[0] = _without_what_it_undoes(others, gives_up[0], broken, recompiles)
    return (*others, *gives_up)


def _without_what_it_undoes(
    others: Sequence[Step], gives_up: Step, broken: frozenset[str], recompiles: bool
) -> tuple[list[Step], Step]:
    """Drop steps that giving FP8 up undoes: changes of FP8 and other ways to compile.

    The last step says how BF16 is compiled, and fixes all their findings. Breakage stays.
    """
    undone = [step for step in others if not broken.intersection(step.mends) and _is_undone(step, recompiles)]
    mends = dict.fromkeys(code for step in (gives_up, *undone) for code in step.mends)
    return [step for step in others if step not in undone], msgspec.structs.replace(
        gives_up, mends=tuple(mends)
    )


def _is_undone(step: Step, recompiles: bool) -> bool:
    """Return whether this step is pointless in BF16, compiled as the last step says."""
    name = step.treatment.name
    if traits(name).family == COMPILATION:
        return True
    if traits(name).helps_bf16_too:
        return False
    if recompiles and any(check.area == COMPILATION for check in _fixed_checks(step)):
        return True
    return _changes_fp8_alone(step) or traits(name).recipe is not None


def _while_in_fp8(steps: Sequence[Step], facts: Facts) -> list[Step]:
    """Drop FP8-only changes if the filter leaves no layer in FP8, and none is new.

    If giving FP8 up is planned too, it says the same in fewer words.
    """
    named = {step.treatment.name: step for step in steps}
    filters = named.get(KEEP_IN_BF16)
    converts = any(name.startswith(CONVERTS) for name in named)
    if filters is None or converts or not if_recorded(_leaves_none, filters.treatment, facts):
        return list(steps)
    instead = named.get(STAY_IN_BF16)
    stays = instead or _of_none(filters)
    moot = [step for step in steps if step is not instead and (step is filters or _changes_fp8_alone(step))]
    mends = dict.fromkeys(code for step in (stays, *moot) for code in step.mends)
    stays = msgspec.structs.replace(stays, mends=tuple(mends))
    by = instead or filters
    return [stays if step is by else step for step in steps if step is by or step not in moot]


def _leaves_none(filters: Treatment, facts: Facts) -> bool:
    """Return whether it leaves out all FP8 layers, of which there are some."""
    in_fp8 = {linear.name for linear in facts.network.linears if linear.use == "training"}
    return bool(in_fp8) and in_fp8.issubset(filters.layers)


def _of_none(filters: Step) -> Step:
    summary = f"{filters.treatment.summary}, which leaves none in FP8"
    return msgspec.structs.replace(
        filters, treatment=msgspec.structs.replace(filters.treatment, summary=summary)
    )


def _by_the_filter(planned: dict[str, Step], facts: Facts) -> list[Step]:
    """Drop the steps that another step's filter carries out.

    Those compile FP8 layers that it leaves out, or leave LoRA's matrices out. It fixes their findings too,
    and saves what the largest of them does.
    """
    filters = planned.get(KEEP_IN_BF16)
    if filters is None:
        return list(planned.values())
    compiles, converts = planned.get(COMPILE_LAYERS), planned.get(CONVERT_BASE_FIRST)
    held = [
        *([compiles] if compiles and _holds(filters.treatment, compiles.treatment) else []),
        *([converts] if converts and has_lora(facts.linears()) else []),
    ]
    savings = [each.saving_ms for each in (filters, *held) if each.saving_ms]
    planned[KEEP_IN_BF16] = msgspec.structs.replace(
        filters,
        mends=(*filters.mends, *(code for each in held for code in each.mends)),
        saving_ms=max(savings, key=lambda saving: saving.middle, default=None),
    )
    return [each for each in planned.values() if each not in held]


def _holds(treatment: Treatment, other: Treatment) -> bool:
    """Return whether a treatment changes all layers that another changes."""
    return bool(other.layers) and {*treatment.layers}.issuperset(other.layers)


def _changes_fp8(step: Step) -> bool:
    """Return whether it changes how FP8 runs: before that, no time decides about FP8."""
    return any(check.changes_fp8 for check in _fixed_checks(step))


def _changes_fp8_alone(step: Step) -> bool:
    return _changes_fp8(step) and not any(check.stays_in_bf16 for check in _fixed_checks(step))


def _fixed_checks(step: Step) -> list[registry.Check]:
    return [check for check in registry.discover() if check.code in step.mends]


def with_timed_shapes(prescription: Sequence[Step], facts: Facts) -> list[Treatment]:
    """Return the proposed treatments, those about shapes as these were timed."""
    treatments = []
    for step in prescription:
        treatment: Treatment | None = step.treatment
        if depends_on_shapes(step) and timed_shapes(facts):
            treatment = if_recorded(describe, KEEP_IN_BF16, facts)
        if treatment is not None:
            treatments.append(treatment)
    return treatments


def depends_on_shapes(step: Step) -> bool:
    """Return whether timed shapes decide which layers this step keeps in BF16."""
    about_shapes = {check.code for check in registry.discover() if check.about_shapes}
    return step.treatment.name == KEEP_IN_BF16 and about_shapes.issuperset(step.mends)


def _whole_plan_was_timed(steps: Sequence[Step], view: TrialView) -> bool:
    """Return whether the timed total holds every step of the plan."""
    total = view.prescribed if view.on_gpu else None
    return total is not None and all(step.treatment.name in total.treatments for step in steps)


def _of_the_total(proposed: Sequence[Step], view: TrialView) -> list[Step]:
    """Return the steps without those that the total left out, and with its additions.

    A total that costs time is no total. If one does not fit, none of its parts is left.
    """
    total, trial = view.prescribed, view.facts.trial
    dropped = set(if_recorded(_too_large_together, view) or ())
    if total is None or view.plan_saves is None:
        return [step for step in proposed if step.treatment.name not in dropped]
    if view.plan_saves.high <= 0:
        return [step for step in proposed if step.treatment.name not in total.treatments]
    timed = {
        name
        for each in trial.arms
        if each.tried and recorded(each, "treatments") and base_of(trial, each)
        for name in each.treatments
    }
    kept = [
        step
        for step in proposed
        if step.treatment.name in total.treatments or step.treatment.name not in timed | dropped
    ]
    named = {step.treatment.name for step in kept}
    return kept + [
        step for name in total.treatments if name not in named and (step := _found_by_trial(name, view))
    ]


def _too_large_together(view: TrialView) -> tuple[str, ...]:
    """Name the treatments that take more memory than there is, all together."""
    every = (each for each in view.facts.trial.arms if in_any_window(each.name) == ArmName.PRESCRIBED)
    return next((each.treatments for each in every if each.treatments in view.too_large), ())


def _found_by_trial(name: str, view: TrialView) -> Step | None:
    """Find a treatment of the total that no finding names, with its saving alone."""
    treatment, saved = describe(name, view.facts), view.savings.get(name)
    if treatment is None or saved is None:
        return None
    faster = "is faster, timed with all else equal"
    title = f"{name} {faster if saved.low > 0 else 'is a part of the fastest step that was timed'}"
    return Step(code="", mends=(), title=title, treatment=treatment, saving_ms=view.saving(saved))


def conversion(view: TrialView) -> list[Step]:
    """List the steps to a model's fastest FP8; empty if BF16 may be as fast."""
    facts = view.facts
    if not timed_a_model(facts) or view.uses_fp8:
        return []
    now, bf16, fp8 = view.as_is, view.bf16, view.fp8
    if facts.trial.device == "cpu" or now is None or bf16 is None or fp8 is None:
        return []
    speedup, saved = ratio(bf16, fp8), saved_ms(now, fp8)
    made_of = fp8.get("treatments", ())
    if not made_of or speedup.low <= 1 or speedup.median < 1 + EVEN or view.fp8_is_noise:
        return []
    title = f"With all fixes a step takes {fp8.step_ms:,.1f} ms, the best BF16 {bf16.step_ms:,.1f} ms"
    saving = view.saving(saved)
    first, *others = treatments(facts, fp8.name, made_of)
    return [
        Step(code="", mends=(), title=title, treatment=first, saving_ms=saving),
        *(Step(code="", mends=(), title=f"Timed with {first.name}", treatment=each) for each in others),
    ]


def treatments(facts: Facts, fp8: str, names: tuple[str, ...]) -> Iterator[Treatment]:
    """Describe the steps of the variant ``fp8``, the conversion first."""
    for name in sorted(names, key=lambda each: traits(each).family != "convert"):
        if traits(name).family == "convert":
            yield convert(facts, name, fp8)
        elif traits(name).compiles:
            yield compiled(facts)
        elif described := describe(name, facts):
            yield described


def convert(facts: Facts, name: str, fp8: str) -> Treatment:
    """Convert what the variant converted, before what the user compiles himself."""
    recipe, linears = recipe_of(fp8), facts.network.linears
    kept = [each.name for each in linears if may_be_taken(each) and not would_be_converted(each)]
    sets = names_in_python(kept)
    arguments = ["model"]
    arguments += [] if recipe == "tensorwise" else [f'config=Float8LinearConfig.from_recipe_name("{recipe}")']
    arguments += ["module_filter_fn=lambda layer, name: name not in keep"] if sets else []
    own = ["# before your own torch.compile, which stays as it is"] if keeps_users_compilation(fp8) else []
    return Treatment(
        name=name,
        summary=f"convert to FP8 ({recipe})",
        code="\n".join([*own, *keep(sets), f"convert_to_float8_training({', '.join(arguments)})"]),
    )


def compiled(facts: Facts) -> Treatment:
    """Compile what was converted, in place of what the user compiles himself."""
    found = compile_treatment(facts, [each for each in facts.network.linears if would_be_converted(each)])
    otherwise = any(keeps_users_compilation(each.name) for each in facts.trial.arms)
    note = "# leave out your own torch.compile\n" if otherwise else ""
    return Treatment(name=found.name, summary=found.summary, code=note + found.code)
