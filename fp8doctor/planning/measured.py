"""Times of a saved report, carried over to another GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fp8doctor.analysis.treatment_table import traits
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.diagnosis.document import read_saved
from fp8doctor.facts import Arm, Facts, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES, ArmName, is_conversion
from fp8doctor.facts.arm_names import recipe_of as converted_to
from fp8doctor.gpus import GpuSpec, has_datasheet, modelled_gpu
from fp8doctor.planning.job_options import options_for
from fp8doctor.planning.share import share_of
from fp8doctor.planning.step_time import Step, step_of
from fp8doctor.recipes import BY_TREATMENT, RECIPES, TORCHAO, Recipe, recipe_of


class Form(NamedTuple):
    """What a step runs: a recipe or BF16, compiled or not."""

    recipe: Recipe | None
    compiled: bool


class Measured(NamedTuple):
    """Measured / estimated step time on the GPU of the report, by form."""

    gpu: GpuSpec
    ratios: dict[Form, float]

    def scaled(self, step: Step, form: Form) -> Step:
        """Scale an estimate by its own form's ratio, else by that of BF16."""
        found = self.ratios.get(form) or self.ratios.get(Form(None, form.compiled))
        return step.scaled(found or next(iter(self.ratios.values())))


def saved_facts(path: Path) -> Facts | None:
    """Read the facts of a saved report; None for another file. Raises `UserError` for a broken report."""
    if path.suffix not in (".json", ".gz") or not path.is_file():
        return None
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if path.suffix == ".gz" or (b'"facts"' in content and b'"schema_version"' in content):
            return read_saved(path)[0]
    return None


def measured(facts: Facts) -> Measured | None:
    """Compare the times of a report with estimates; None if nothing reliable was timed on a known GPU."""
    trial = facts.trial if recorded(facts, "trial") else None
    gpu = modelled_gpu(facts) if has_datasheet(facts) else None
    if trial is None or gpu is None or trial.get("device") != "cuda" or not trial.get("reliable"):
        return None
    options = options_for(facts, {})
    share, ratios = share_of(in_bf16(facts), options), dict[Form, float]()
    for form, arm in _forms(facts):
        stack = form.recipe.stack if form.recipe else TORCHAO.name
        step = step_of(share, options, gpu, form.recipe, stack=stack, compiled=form.compiled)
        if step is not None and arm.step_ms and form not in ratios:
            ratios[form] = arm.step_ms / step.ms
    return Measured(gpu, ratios) if ratios else None


def _forms(facts: Facts) -> Iterator[tuple[Form, Arm]]:
    """List the timed variants that a plan has a row for, the fastest of each first."""
    arms = [each for each in facts.trial.arms if each.tried and each.step_ms]
    compiled_now = all(each.compiled is not None for each in facts.network.linears if each.role == "body")
    own = {recipe_of(each) for each in facts.network.fp8 if each.get("recipe")}
    for arm in sorted(arms, key=lambda each: each.step_ms or 0.0):
        treatments = arm.get("treatments", ())
        if arm.name in BF16_BASELINES:
            yield Form(None, arm.name != ArmName.BF16), arm
            continue
        compiled = compiled_now or any(traits(each).compiles for each in treatments)
        changed = [BY_TREATMENT[each] for each in treatments if each in BY_TREATMENT]
        if is_conversion(arm.name):
            yield Form(RECIPES.get((TORCHAO.name, converted_to(arm.name))), compiled), arm
        elif arm.name in (ArmName.AS_IS, ArmName.PRESCRIBED) or changed:
            recipes = changed or list(own)
            if len(recipes) == 1 and facts.network.fp8:
                yield Form(recipes[0], compiled), arm
            elif arm.name == ArmName.AS_IS and not facts.network.fp8:
                yield Form(None, compiled), arm
