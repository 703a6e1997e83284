"""What is caught and told in a sentence leaves its traceback to the logger ``fp8doctor``."""

import ast
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fp8doctor import inspect_model
from tests.logged import Records

PACKAGE = Path(__file__).parents[1] / "fp8doctor"
FOLDERS = ("cli", "examine", "loading", "profiling", "stacks", "worker")

HANDED_ON = {"format_exception"}
"""Functions whose callers print the traceback themselves."""


def broad_handlers() -> list[Any]:
    """Handlers of every exception that raise none."""
    return [
        pytest.param(node, id=f"{path.relative_to(PACKAGE)}:{node.lineno}")
        for folder in FOLDERS
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and isinstance(node.type, ast.Name)
        and node.type.id in ("Exception", "BaseException")
        and not any(isinstance(each, ast.Raise) for each in ast.walk(node))
    ]


@pytest.mark.parametrize("handler", broad_handlers())
def test_no_exception_is_swallowed_without_its_traceback(handler: ast.ExceptHandler) -> None:
    calls = [each for each in ast.walk(handler) if isinstance(each, ast.Call)]
    logged = [each for each in calls if any(word.arg == "exc_info" for word in each.keywords)]
    handed_on = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id in HANDED_ON]
    assert logged or handed_on


class Odd(nn.Module):
    """A model whose first layer has more channels than a tensor can have."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 16)
        self.patches.in_channels = 2**60


def test_the_traceback_of_a_users_exception_is_logged_and_not_printed(
    logged: Records, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("fp8doctor").setLevel(logging.DEBUG)
    report = inspect_model(Odd(), trial=False)
    assert "no synthetic batch could be built: RuntimeError" in report.facts.workload.note
    (record,) = [each for each in logged.kept if each.getMessage() == "no synthetic batch could be built"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
    logged.kept.clear()
    logging.getLogger("fp8doctor").setLevel(logging.NOTSET)
    inspect_model(Odd(), trial=False)
    assert not logged.kept
    assert capfd.readouterr() == ("", "")
