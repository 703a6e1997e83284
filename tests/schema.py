"""Write the JSON Schema of a report again: ``python -m tests.schema``."""

from __future__ import annotations

import json
from pathlib import Path

import fp8doctor
from fp8doctor.diagnosis.document import schema

FILE = Path(fp8doctor.__file__).with_name("report.schema.json")


def text() -> str:
    return json.dumps(schema()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
