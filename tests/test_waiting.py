"""No test waits for ever: a wait fails with a sentence, each for a process or a thread has a bound."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for

HERE = Path(__file__).parent
WAITS = ("run", "check_call", "check_output", "communicate", "join")
"""Functions of ``subprocess`` and methods of processes and threads that wait for ever without a bound."""


def test_a_wait_fails_with_a_sentence() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^waited 0 s for the end of time$"):
        wait_for("the end of time", lambda: False, within_s=0.0)


def unbounded(tree: ast.AST) -> Iterator[str]:
    """Name the calls that wait for a process or a thread without a bound."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        of, name = ast.unparse(call.func.value), call.func.attr
        if name not in WAITS or (name == "run" and of != "subprocess"):
            continue
        bounded = any(word.arg == "timeout" for word in call.keywords)
        if not (bounded or (name == "join" and call.args)):
            yield f"line {call.lineno}: {of}.{name}"


@pytest.mark.slow
def test_processes_and_threads_are_waited_for_with_a_bound() -> None:
    assert {
        str(path.relative_to(HERE)): found
        for path in sorted(HERE.rglob("*.py"))
        if (found := list(unbounded(ast.parse(path.read_text("utf-8")))))
    } == {}
