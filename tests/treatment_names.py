"""The names that checks give to treatments, read from their files."""

import ast
import re
from itertools import pairwise
from pathlib import Path

CHECKS = Path(__file__).resolve().parents[1] / "checks"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")


def treatment_names(path: Path) -> set[str]:
    """The names that a file gives to treatments outright, in either branch of a condition, or in a table."""
    tree = ast.parse(path.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    given = [
        each.value for call in calls for each in call.keywords if each.arg == "name" and is_treatment(call)
    ]
    branches = [side for each in given if isinstance(each, ast.IfExp) for side in (each.body, each.orelse)]
    outright = {str(each.value) for each in (*given, *branches) if isinstance(each, ast.Constant)}
    looked_up = any(not isinstance(each, ast.Constant | ast.IfExp) for each in given)
    return outright | (names_in_tables(tree) if looked_up else set())


def names_in_tables(tree: ast.AST) -> set[str]:
    """The names that stand in a tuple in front of their summary."""
    rows = (node.elts for node in ast.walk(tree) if isinstance(node, ast.Tuple))
    pairs = (pair for row in rows for pair in pairwise(row))
    return {
        str(name.value)
        for name, summary in pairs
        if isinstance(name, ast.Constant) and NAME.fullmatch(str(name.value)) and is_text(summary)
    }


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and " " in str(node.value))


def is_treatment(call: ast.Call) -> bool:
    return ast.unparse(call.func) in ("Treatment", "kit.Treatment")


def all_names() -> set[str]:
    """The names of all checks."""
    return {name for path in CHECKS.rglob("*.py") for name in treatment_names(path)}
