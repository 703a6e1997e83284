"""Write the JSON Schemas of a report and of a plan again: ``python -m tests.schema``."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import fp8doctor
from fp8doctor.diagnosis.document import schema
from fp8doctor.facts.record import schema_of
from fp8doctor.planning.estimates import Row
from fp8doctor.planning.job_options import Options
from fp8doctor.planning.plan_document import PlanDocument, Setup

PACKAGE = Path(fp8doctor.__file__).parent
FILE, PLAN = PACKAGE / "report.schema.json", PACKAGE / "plan.schema.json"


def text(file: Path = FILE) -> str:
    if file == FILE:
        return json.dumps(schema()) + "\n"
    found = schema_of(PlanDocument, "fp8doctor plan")
    for kind in (PlanDocument, Options, Row, Setup):
        for name, said in docstrings(kind):
            found["$defs"][kind.__name__]["properties"][name]["description"] = said
    return json.dumps(found) + "\n"


def docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field that a string follows, and the string."""
    [of_class] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(of_class, ast.ClassDef)
    for field, said in pairwise(of_class.body):
        if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(said.value, ast.Constant)
            yield field.target.id, " ".join(said.value.value.split())


if __name__ == "__main__":
    for each in (FILE, PLAN):
        each.write_text(text(each), encoding="utf-8")
