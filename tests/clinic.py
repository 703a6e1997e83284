"""The patients: model files with what each must be told and must not, and their facts.

A patient that prepares its process before it imports anything is examined by the real worker, the others in
forks of a process that has done their imports, as `tests.programs` makes them.
"""

import ast
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8doctor.facts import Facts
from fp8doctor.worker.parent import Examination, examine_in_worker
from tests import programs

FOLDER = Path(__file__).parent / "patients"

EXAMINE = """
import dataclasses, json, sys
import torch._dynamo
import torch._inductor.compile_fx
from fp8doctor.examine import examine
from fp8doctor.trial import with_forward
from fp8doctor.loading.model_file import load
path = sys.argv[1]
torch.Tensor.normal_ = torch.Tensor.uniform_ = lambda weights, *_, **__: weights.fill_(0.01)
job = load(path)
facts = with_forward(job, examine(job))
"""
"""What a worker does with a model file that is not to be timed. No fact is of the weights' values, and random
ones of lora_fp32 take 5 s of CPU."""

TELL = "print(json.dumps(facts.to_dict()))\n"
"""Takes 0.6 s of CPU with `EXAMINE`, on average."""

HEAVY = {
    "torch": "torch",
    "torchao": "torchao.float8",
    "transformers": "transformers.modeling_utils",
    "peft": "peft",
}
"""The module of a package that every patient with this package imports, and that takes the time. The one of
transformers imports torch and torchao."""

READ_LATE = ("os.environ['ACCELERATE_", "os.environ['FP8_", "sys.path.insert(0, ")
"""Statements that prepare no import of `HEAVY`: Accelerate reads its variables when an Accelerator is made,
and the folders hold what stands in for Transformer Engine and for the metadata of others."""


@dataclass(frozen=True)
class Patient:
    """A model file with a known disease, or none."""

    path: Path
    must: tuple[str, ...]
    """Codes that have to be found."""
    must_not: tuple[str, ...]
    """Codes that would be false alarms."""
    healthy: bool
    """Whether nothing may be found at warning or above."""

    @property
    def name(self) -> str:
        return self.path.stem


def patients(folder: Path = FOLDER) -> tuple[Patient, ...]:
    """The patients of a folder, read without running them: a patient may set variables when it runs."""
    return tuple(read(path) for path in sorted(folder.glob("*.py")))


def read(path: Path) -> Patient:
    """The constants of a patient's file."""
    constants = {}
    for node in ast.parse(path.read_text("utf-8")).body:
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if isinstance(target, ast.Name) and target.id in ("MUST", "MUST_NOT", "SILENT"):
            constants[target.id] = ast.literal_eval(node.value)  # type: ignore[union-attr]
    return Patient(path, constants["MUST"], constants["MUST_NOT"], constants.get("SILENT", False))


@functools.cache
def examined(patient: Patient) -> Examination:
    """Examine a patient in a process of its own, once in this process."""
    if first_imports(patient.path) is None:
        return examine_in_worker(str(patient.path), progress=lambda stage: None)
    return Examination(Facts.from_dict(answered(patient, EXAMINE + TELL)), None)


def answered(patient: Patient, program: str) -> dict[str, Any]:
    """Return the JSON that a program prints about a patient, in a fork that has the patient's imports."""
    lines = [f"import {each}" for each in sorted(first_imports(patient.path) or ())]
    printed = programs.printed("\n".join((*lines, program)), str(patient.path))
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def first_imports(path: Path) -> set[str] | None:
    """The heavy modules that a file and its siblings import before anything else; None where something comes
    before an import, which needs a fresh process."""
    heavy: set[str] = set()
    done = False
    for node in ast.parse(path.read_text("utf-8")).body[1:]:
        if ast.unparse(node).startswith(READ_LATE):
            continue
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            done = True
            continue
        if done:
            return None
        package = (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        sibling = path.with_name(f"{package}.py")
        if sibling.exists():
            further = first_imports(sibling)
            if further is None:
                return None
            heavy |= further
        elif (name := package.partition(".")[0]) in HEAVY:
            heavy.add(HEAVY[name])
    return heavy
