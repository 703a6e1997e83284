"""Folders of third-party checks: which files of one are run, and what becomes of one that fails.

What such a file prints goes to stderr: stdout belongs to the report.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from fp8doctor.errors import UserError
from fp8doctor.wording import error_in_words, escaped

MOST_FILES = 1000
"""Python files in a folder and those right below it; where there are more, it was hardly meant. A convention
of this tool."""

PREFIX = "fp8doctor_checks_"
"""Begins the names under which such files are imported."""


def import_folder(folder: Path) -> None:
    """Run the Python files of a folder and of the folders right below it, each once in a process.

    Raises `UserError` for a folder that is none, holds too much, or has a file that cannot be imported.
    """
    if not folder.is_dir():
        raise UserError(f"--checks {escaped(str(folder))}: no such folder")
    if folder.resolve() == Path(folder.resolve().anchor):
        raise UserError(f"--checks {folder}: that is the root of the file system; name the folder of checks")
    for path in _files(folder):
        _import(path)


def output_of(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Where a check may print: one out of such a folder on stderr."""
    return redirect_stdout(sys.stderr) if function.__module__.startswith(PREFIX) else nullcontext()


def _files(folder: Path) -> list[Path]:
    """Regular files, none of them hidden or private."""
    found = []
    for path in (*folder.glob("*.py"), *folder.glob("[!._]*/*.py")):
        if not path.name.startswith((".", "__")) and path.is_file():
            found.append(path)
        if len(found) > MOST_FILES:
            raise UserError(
                f"--checks {escaped(str(folder))}: there are more than {MOST_FILES} Python files in it and "
                "right below it; name the folder of checks"
            )
    return sorted(found)


def _import(path: Path) -> None:
    name = PREFIX + re.sub(r"\W", "_", str(path.resolve().with_suffix("")))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"--checks {escaped(str(path))}: {error_in_words(error)}") from error
