"""The patients: model files with what each must be told and must not, and their facts, made by the real
worker."""

from __future__ import annotations

import ast
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

from fp8doctor.facts import Facts
from fp8doctor.facts.record import encode
from fp8doctor.worker.parent import Examination, examine_in_worker

FOLDER = Path(__file__).parent / "patients"
KEPT_IN = "FP8DOCTOR_TESTS_KEEP_FACTS_IN"
"""A variable that names a folder: facts of one run of the tests, kept there for the matrix of the same
gate."""

NOT_PATIENTS = ("__init__", "record")


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
    return tuple(read(path) for path in sorted(folder.glob("*.py")) if path.stem not in NOT_PATIENTS)


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
        if isinstance(target, ast.Name) and target.id in ("MUST", "MUST_NOT", "HEALTHY"):
            constants[target.id] = ast.literal_eval(node.value)  # type: ignore[union-attr]
    return Patient(path, constants["MUST"], constants["MUST_NOT"], constants.get("HEALTHY", False))


@functools.cache
def examined(patient: Patient) -> Examination:
    """What a worker process of its own found out about a patient, once in this process; see `KEPT_IN`."""
    folder = os.environ.get(KEPT_IN)
    kept = Path(folder, f"{patient.name}.json") if folder else None
    if kept and kept.exists():
        return Examination(Facts.from_dict(json.loads(kept.read_text("utf-8"))), None)
    examination = examine_in_worker(str(patient.path), progress=lambda stage: None)
    if kept and examination.problem is None:
        kept.write_bytes(encode(examination.facts.to_dict()))
    return examination
