"""A course of treatment: the script of a user whose model is examined, told what to change, changed by the
lines as they are printed, and examined again."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from fp8doctor import inspect_model
from fp8doctor.finding import Treatment
from fp8doctor.report import Report
from research.treating import NO_GPU, without_arithmetic
from research.zoo.animals import Animal

FITS = """from torchao.float8 import convert_to_float8_training
linear = lambda module: type(module) is torch.nn.Linear   # what derives from it may return more
fits = lambda module: linear(module) and not (module.in_features % 16 or module.out_features % 16)
"""
ALL = f"{FITS}convert_to_float8_training(model, module_filter_fn=lambda module, name: fits(module))"
FILTERED = f"""{FITS}last = [name for name, module in model.named_modules() if linear(module)][-1]
convert_to_float8_training(model, module_filter_fn=lambda module, name: fits(module) and name != last)"""
THIRD = f"""{FITS}some = [name for name, module in model.named_modules() if linear(module)][::3]
convert_to_float8_training(model, module_filter_fn=lambda module, name: fits(module) and name in some)"""
LORA = """from peft import LoraConfig, get_peft_model
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))"""
BY_HAND = """for module in model.modules():
    if isinstance(module, torch.nn.ModuleList):
        for block in filter(None, module):
            block.compile(backend="eager")"""
CONTAINERS = """for name, module in list(model.named_modules()):
    if name and type(module) is torch.nn.Sequential:
        module.compile()"""

STATES = {
    "in BF16": ("", "", ""),
    "every third layer converted": ("", THIRD, ""),
    "everything converted": ("", ALL, ""),
    "converted by a filter": ("", FILTERED, ""),
    "converted, blocks compiled without kernels": ("", FILTERED, BY_HAND),
    "converted, every Sequential compiled in place": ("", FILTERED, CONTAINERS),
    "LoRA, then everything converted": (LORA, ALL, ""),
}
"""What a script does with a model: before the conversion to FP8, for it, and after it."""

ROUNDS = 3
"""Reports after which nothing may be left to prescribe."""


@dataclasses.dataclass
class Script:
    """A training script: the lines around a model, and the model that they make."""

    animal: Animal
    before: str
    conversion: str
    after: tuple[str, ...]

    def changed(self, treatment: Treatment) -> Script:
        """The script with the lines of a treatment: in the place of the conversion where they convert, or
        leave it out, else at the end."""
        if treatment.name == "stay-in-bf16":
            return dataclasses.replace(self, conversion="", after=(*self.after, treatment.code))
        if treatment.name == "default-backend":
            return dataclasses.replace(self, after=(treatment.code, *self.after[1:]))
        if "convert_to_float8_training(" in treatment.code:
            return dataclasses.replace(self, conversion=treatment.code)
        return dataclasses.replace(self, after=(*self.after, treatment.code))

    def run(self) -> nn.Module:
        """The model that the lines make."""
        model = self.animal.make()
        for code in (self.before, self.conversion, *self.after):
            names = {"model": model, "torch": torch}
            names["optimizer"] = torch.optim.SGD(model.parameters())
            exec(code, names)
            model = names["model"]
        return model


@dataclasses.dataclass
class Course:
    """What became of one model in one state."""

    animal: str
    state: str
    rounds: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    """Names of the treatments of each report."""
    ran: int = 0
    """Treatments whose lines were run, with a forward and a backward of the model after them."""
    not_run: list[str] = dataclasses.field(default_factory=list)
    """Treatments whose lines say that they are for a shell, or a sketch."""
    defects: list[str] = dataclasses.field(default_factory=list)


def examined(model: nn.Module) -> Report:
    return inspect_model(model, trial=False)


def take(animal: Animal, state: str) -> Course:
    """Examine a model in a state, follow each line that is printed alone, and then all of them until none is
    printed any more."""
    before, conversion, after = STATES[state]
    script = Script(animal, before, conversion, (after,) if after else ())
    course = Course(animal.name, state)
    try:
        report = examined_and_run(script)
    except Exception as error:
        course.not_run.append(f"the state itself: {in_words(error)}")
        return course
    course.defects += [f"{each.code} crashed" for each in report.outcomes if each.outcome == "crashed"]
    for finding in report.findings:
        if finding.treatment and (after_it := followed(script, finding.treatment, course)):
            left = {(each.code, each.treatment and each.treatment.code) for each in after_it.findings}
            if finding.severity != "info" and (finding.code, finding.treatment.code) in left:
                course.defects.append(f"{finding.code} is not silenced by {finding.treatment.name}")
    follow_all(script, report, course)
    return course


def follow_all(script: Script, report: Report, course: Course) -> None:
    """Follow one prescription after the other until none is left."""
    done: set[str] = set()
    for _ in range(ROUNDS):
        steps = [each.treatment for each in report.prescription]
        course.rounds.append(tuple(each.name for each in steps))
        runnable = [each for each in steps if each.kind == "python"]
        for each in runnable:
            if each.code in done:
                course.defects.append(f"{each.name} is prescribed again")
                return
            done.add(each.code)
            script = script.changed(each)
        if not runnable:
            return
        try:
            report = examined_and_run(script)
        except Exception as error:
            where = course.not_run if any(each in str(error) for each in NO_GPU) else course.defects
            where.append(f"{' + '.join(each.name for each in runnable)}: {in_words(error)}")
            return
    names = ", ".join(each.treatment.name for each in report.prescription)
    if names:
        course.defects.append(f"after {ROUNDS} rounds: {names}")


def followed(script: Script, treatment: Treatment, course: Course) -> Report | None:
    """The report after this treatment alone; None where its lines are not to be run, or the model fails."""
    if treatment.kind != "python":
        course.not_run.append(f"{treatment.name} ({treatment.kind})")
        return None
    try:
        report = examined_and_run(script.changed(treatment))
    except Exception as error:
        where = course.not_run if any(each in str(error) for each in NO_GPU) else course.defects
        where.append(f"{treatment.name}: {in_words(error)}")
        return None
    course.ran += 1
    return report


def examined_and_run(script: Script) -> Report:
    """The report on the model that a script makes, which runs forward and backward afterwards."""
    model = script.run()
    report = inspect_model(model, trial=False)
    with without_arithmetic():
        script.animal.step(model)
    return report


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
