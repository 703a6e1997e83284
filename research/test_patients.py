"""What every patient is told to do runs as it stands, and mends."""

from __future__ import annotations

import functools
from typing import Any

from tests.clinic import EXAMINE, Patient, answered, first_imports
from tests.test_patients import PATIENTS, each_patient, report_on

TREAT = """
import dataclasses
from research.treating import treat
print(json.dumps(dataclasses.asdict(treat(path, job, facts))))
"""


@functools.cache
def treated(patient: Patient) -> dict[str, Any] | None:
    """Return the `research.treating.Course` of a patient; None if the real worker examines it."""
    return None if first_imports(patient.path) is None else answered(patient, EXAMINE + TREAT)


@each_patient
def test_what_is_printed_runs_and_mends(patient: Patient) -> None:
    """Every line that is Python is run as it stands, with a forward and a backward after it, and is not
    prescribed again; those of a patient that the worker examines are for a shell."""
    course = treated(patient)
    if course is None:
        assert {step.treatment.kind for step in report_on(patient).prescription} <= {"shell"}
        return
    assert course["failed"] == {}
    assert set(course["rounds"][-1]) <= set(course["not_run"])
    assert len(course["ran"]) == len(set(course["ran"]))


def test_most_lines_were_run() -> None:
    courses = [course for patient in PATIENTS.values() if (course := treated(patient))]
    why = {reason.partition(":")[0] for course in courses for reason in course["not_run"].values()}
    assert why == {"shell", "sketch", "NotImplementedError", "ImportError"}
    assert sum(len(course["ran"]) for course in courses) >= 30
