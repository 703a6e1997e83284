"""A patient that does as it is told: the lines of its prescription are run as they are printed, its step
after each, and it is examined again, until nothing that runs is left to prescribe.

A fork of `tests.clinic` does so.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.code_snippets import free_names
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.examine import examine
from fp8doctor.facts import Facts
from fp8doctor.finding import Treatment
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.report import Report
from fp8doctor.trial.copies.step import call, loss_of, move

ROUNDS = 3
"""Reports after which nothing may be left to prescribe."""

MOST_ROWS = 8
"""Samples, and tokens of each, that a CPU is given."""

NO_GPU = ("requires triton", "finegrained-fp8 kernel unavailable")
"""Of what is raised without a GPU: by torchao for experts in FP8, by transformers for weights stored in
FP8."""

CONVERT, ACCELERATOR = "torchao.float8.convert_to_float8_training", "accelerate.Accelerator"
"""What a file calls, and lines call again in its place."""


@dataclasses.dataclass
class Course:
    """What became of a patient."""

    rounds: list[list[str]] = dataclasses.field(default_factory=list)
    """Names of the treatments of each prescription."""
    ran: list[str] = dataclasses.field(default_factory=list)
    """Treatments whose lines were run, with a forward and a backward after them."""
    not_run: dict[str, str] = dataclasses.field(default_factory=dict)
    """Treatments whose lines cannot be run here, and why: they are for a shell, or a sketch, or want what no
    CPU has."""
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """What a treatment's lines, or the step after them, raised."""


def treat(path: str, job: Job, facts: Facts) -> Course:
    """Follow one prescription after the other, and then each line that is printed beside them."""
    course, script = Course(), Script(path, job)
    report = first = Report.of(diagnose(facts))
    for _ in range(ROUNDS):
        steps = [step.treatment for step in report.prescription]
        course.rounds.append([each.name for each in steps])
        ran = [each.name for each in steps if followed(script, each, course)]
        if not ran:
            break
        report = Report.of(diagnose(examine(script.job)))
    prescribed = {step.treatment.code for step in first.prescription}
    for finding in first.findings:
        if finding.treatment and finding.treatment.code not in prescribed:
            prescribed.add(finding.treatment.code)
            followed(Script(path, None), finding.treatment, course)
    return course


def followed(script: Script, treatment: Treatment, course: Course) -> bool:
    """Whether the lines were run, and the step after them."""
    if treatment.kind != "python":
        course.not_run[treatment.name] = treatment.kind
        return False
    try:
        script.follow(treatment)
        step(script.job)
    except Exception as error:
        where = course.not_run if any(each in str(error) for each in NO_GPU) else course.failed
        where[treatment.name] = f"{type(error).__name__}: {error}"
        return False
    course.ran.append(treatment.name)
    return True


class Script:
    """The training script that a model file stands for, and what was changed in it."""

    def __init__(self, path: str, job: Job | None) -> None:
        self.path, self._job = path, job
        self.instead: dict[str, str] = {}
        """Lines in the place of the file's own call, by what it calls."""
        self.after: list[str] = []

    @property
    def job(self) -> Job:
        """What the script trains."""
        self._job = self._job or loaded_again(self.path, self.instead)
        return self._job

    def holds(self, text: str) -> bool:
        """Whether the file, or one beside it that it imported, has these words."""
        beside = {module.__file__ for module in list(sys.modules.values()) if is_beside(self.path, module)}
        return any(text in Path(each).read_text("utf-8") for each in {self.path, *beside})

    def follow(self, treatment: Treatment) -> None:
        """Change the script by the lines: in the place of what they do again, or at its end."""
        used = set(free_names(ast.parse(treatment.code)))
        converts = "convert_to_float8_training("
        again = [CONVERT] if converts in treatment.code and self.holds(converts) else []
        again += [ACCELERATOR] if "Accelerator(" in treatment.code and "model" not in used else []
        if treatment.name == STAY_IN_BF16:
            leave_fp8_out()
            self.instead = {CONVERT: ""}
        if treatment.name == STAY_IN_BF16 or not again:
            self.after.append(treatment.code)
        else:
            self.instead[again[0]] = treatment.code
        if self._job is None or treatment.name == STAY_IN_BF16 or again:
            self._job = loaded_again(self.path, self.instead)
            lines = self.after
        else:
            lines = self.after[-1:]
        for code in lines:
            self._run(code)

    def _run(self, code: str) -> None:
        optimizer = self.job.optimizer or torch.optim.SGD(self.job.model.parameters())
        given = self.job.model
        if "convert_to_float8_training(" in code:  # it stands before the script's own torch.compile
            given = getattr(given, "_orig_mod", given)
        names = {"model": given, "torch": torch, "optimizer": optimizer, "batch": self.job.batch}
        if "Accelerator(" in code:
            forget_accelerate()
        with autocast_on_meta():
            exec(code, names)
        kept = names["optimizer"] if self.job.optimizer or names["optimizer"] is not optimizer else None
        model = self.job.model if names["model"] is given else names["model"]
        self._job = dataclasses.replace(self.job, model=model, optimizer=kept)


def loaded_again(path: str, instead: dict[str, str]) -> Job:
    """The job of a model file, loaded as if for the first time, with these lines in the place of its
    calls."""
    for name in [name for name, module in sys.modules.items() if is_beside(path, module)]:
        del sys.modules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "environ", Launched(os.environ)))
        forget_accelerate()
        for called, code in instead.items():
            stack.enter_context(mock.patch(called, lines_for(called, code)))
        return load(path)


def lines_for(called: str, code: str) -> Callable[..., Any]:
    """A function that runs these lines, in which the call itself is the real one."""
    module, _, name = called.rpartition(".")
    real = getattr(sys.modules[module], name)

    def run(model: nn.Module | None = None, *_: Any, **__: Any) -> Any:
        names: dict[str, Any] = {"model": model, "torch": torch}
        with mock.patch(called, real):
            exec(code, names)
        return names["model" if called == CONVERT else "accelerator"]

    return run


def forget_accelerate() -> None:
    """Let a new Accelerator decide again, as in a new process."""
    if "accelerate" in sys.modules:
        from tests.stand_ins.accelerate_state import forget

        forget()


class Launched(dict[str, str]):
    """The environment in which a launcher starts a script: what a file sets for it is in it already."""

    def __setitem__(self, name: str, value: str) -> None:
        if not name.startswith("ACCELERATE_"):
            super().__setitem__(name, value)


def leave_fp8_out() -> None:
    """Launch with BF16."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_FP8_")]:
        del os.environ[name]
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"


def is_beside(path: str, module: Any) -> bool:
    """Whether a module is a file of the same folder."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent == Path(path).parent


def step(job: Job) -> None:
    """One forward and backward, as far as `without_arithmetic` lets them compute."""
    device = next(job.model.parameters()).device
    batch = move(job.batch, device)
    if device.type == "cpu":
        batch = torch.utils._pytree.tree_map_only(torch.Tensor, few, batch)
    autocast = torch.autocast(device.type, dtype=job.autocast) if job.autocast else contextlib.nullcontext()
    with without_arithmetic(), autocast_on_meta(), autocast:
        loss = loss_of(job, call(job.model, batch), batch)
        loss.backward()


def few(tensor: torch.Tensor) -> torch.Tensor:
    """A few tokens of a few samples."""
    sizes = tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape
    return tensor[tuple(slice(MOST_ROWS) for _ in sizes[:2])]


@contextlib.contextmanager
def without_arithmetic() -> Iterator[None]:
    """Dynamo compiles nothing, FP8 layers multiply as nn.Linear does, and masks are made without a look at
    their values, of which a tensor on the meta device has none: what is tried is whether a model can be
    called, not what it computes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mock.patch.object(Float8Linear, "forward", in_bf16))
        if "transformers.masking_utils" in sys.modules:
            stack.enter_context(mock.patch("transformers.masking_utils.is_tracing", return_value=True))
        yield


def in_bf16(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    gathered = getattr(layer.weight, "to_original_precision", None)  # FSDP2 hands it over in FP8
    return nn.functional.linear(x, gathered() if gathered else layer.weight, layer.bias)


def autocast_on_meta() -> Any:
    """torch.autocast, which knows no meta device, takes it for a CPU there."""

    class Autocast(torch.autocast):
        def __init__(self, device_type: str, *arguments: Any, **named: Any) -> None:
            super().__init__("cpu" if device_type == "meta" else device_type, *arguments, **named)

    return mock.patch.object(torch, "autocast", Autocast)
