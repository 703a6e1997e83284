"""The names that checks give to treatments, read from their files."""

from __future__ import annotations

import ast
from pathlib import Path

CHECKS = Path(__file__).resolve().parents[1] / "checks"


def treatment_names(path: Path) -> set[str]:
    """The names that a file gives to treatments outright, in either branch of a condition."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    given = [
        each.value for call in calls for each in call.keywords if each.arg == "name" and is_treatment(call)
    ]
    branches = [side for each in given if isinstance(each, ast.IfExp) for side in (each.body, each.orelse)]
    return {str(each.value) for each in (*given, *branches) if isinstance(each, ast.Constant)}


def is_treatment(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "Treatment"


def all_names() -> set[str]:
    """The names of all checks."""
    return {name for path in CHECKS.rglob("*.py") for name in treatment_names(path)}
