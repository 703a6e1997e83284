"""Another interpreter for the worker: asked what it is, and refused in a sentence where it cannot run it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fp8doctor.errors import UserError
from fp8doctor.worker.interpreter import checked_interpreter


def stands_in(folder: Path, answer: str) -> str:
    """An interpreter that answers so."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\n")
    file.chmod(0o755)
    return str(file)


def test_this_interpreter_borrows_nothing() -> None:
    assert checked_interpreter(sys.executable) == {}


def test_what_is_lacking_is_borrowed_by_its_file(tmp_path: Path) -> None:
    import msgspec
    import packaging

    version = list(sys.version_info[:2])
    python = stands_in(tmp_path, f'[{version}, "{sys.implementation.name}", ["torch", "pynvml"]]')
    assert checked_interpreter(python) == {"packaging": packaging.__file__, "msgspec": msgspec.__file__}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('[[3, 9], "cpython", ["torch"]]', r"is Python 3.9, and fp8doctor needs 3.11 or newer"),
        ('[[3, 12], "cpython", ["msgspec"]]', "has no torch"),
        (
            '[[3, 99], "cpython", ["torch", "packaging"]]',
            "cannot borrow msgspec; install it there: .* -m",
        ),
        ("no Python at all", "does not answer as a Python does: no Python at all"),
        ("[1, 2]", "does not answer as a Python does"),
    ],
)
def test_one_that_cannot_run_the_worker_is_refused(tmp_path: Path, answer: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        checked_interpreter(stands_in(tmp_path, answer))


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        checked_interpreter(str(tmp_path))
