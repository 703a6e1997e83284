"""Write the JSON Schemas of a report and of a plan again: ``python -m tests.schema``."""

from __future__ import annotations

import json
from pathlib import Path

import fp8doctor
from fp8doctor.diagnosis.document import schema
from fp8doctor.facts.record import schema_of
from fp8doctor.planning.plan_document import PlanDocument

PACKAGE = Path(fp8doctor.__file__).parent
FILE, PLAN = PACKAGE / "report.schema.json", PACKAGE / "plan.schema.json"


def text(file: Path = FILE) -> str:
    found = schema() if file == FILE else schema_of(PlanDocument, "fp8doctor plan")
    return json.dumps(found) + "\n"


if __name__ == "__main__":
    for each in (FILE, PLAN):
        each.write_text(text(each), encoding="utf-8")
