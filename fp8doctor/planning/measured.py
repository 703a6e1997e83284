"""Times of a saved report, carried over to another GPU part by part."""

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

GROUPS = {
    **dict.fromkeys(("matmuls", "head", "experts", "gemm_fp8", "gemm_16bit", "gemm_fp32"), "matmuls"),
    "attention": "attention",
    "communication": "communication",
}
"""Part of a plan or family of kernels -> the group in which both are compared; all others wait for memory."""

IDLE = ("host", "bubble")
"""Parts in which the GPU does nothing."""


class Form(NamedTuple):
    """What a step runs: a recipe or BF16, compiled or not."""

    recipe: Recipe | None
    compiled: bool


class Measured(NamedTuple):
    """Measured / estimated time on the GPU of the report, by form and by part."""

    gpu: GpuSpec
    ratios: dict[Form, dict[str, float]]
    """The empty name stands for all parts that the GPU works on."""
    idle_ms: dict[Form, float]

    def scaled(self, step: Step, form: Form, gpu: GpuSpec) -> Step:
        """Scale an estimate by its own form's ratios, else by those of BF16.

        Another GPU waits at least as long for the host as the measured one.
        """
        found = self.ratios.get(form) or self.ratios.get(Form(None, form.compiled))
        found = found or next(iter(self.ratios.values()))
        parts = {
            part: ms * (1.0 if part in IDLE else found.get(GROUPS.get(part, "memory"), found[""]))
            for part, ms in step.parts.items()
        }
        if form in self.idle_ms:
            idle = self.idle_ms[form]
            parts["host"] = idle if gpu == self.gpu else max(parts["host"], idle)
        return Step(parts, step.in_balance)


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
    share, ratios, idle = share_of(in_bf16(facts), options), {}, {}
    for form, arm in _forms(facts):
        stack = form.recipe.stack if form.recipe else TORCHAO.name
        step = step_of(share, options, gpu, form.recipe, stack=stack, compiled=form.compiled)
        if step is not None and arm.step_ms and form not in ratios:
            ratios[form], idle[form] = _ratios(arm, step), _idle(arm)
    return Measured(gpu, ratios, idle) if ratios else None


def _ratios(arm: Arm, step: Step) -> dict[str, float]:
    """Divide the parts of a timed step by the estimated ones."""
    breakdown = arm.get("breakdown")
    timed, estimated = dict[str, float](), dict[str, float]()
    for part, ms in step.parts.items():
        if part not in IDLE:
            group = GROUPS.get(part, "memory")
            estimated[group] = estimated.get(group, 0.0) + ms
    for family, ms in breakdown.families_ms.items() if breakdown and breakdown.reliable else ():
        group = GROUPS.get(family, "memory")
        timed[group] = timed.get(group, 0.0) + ms
    whole = ((arm.step_ms or 0.0) - _idle(arm)) / sum(estimated.values())
    return {"": whole} | {group: ms / estimated[group] for group, ms in timed.items() if estimated.get(group)}


def _idle(arm: Arm) -> float:
    breakdown = arm.get("breakdown")
    return breakdown.idle_ms if breakdown else 0.0


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
