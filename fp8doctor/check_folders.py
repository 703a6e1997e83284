"""Third-party checks, of folders and of installed packages: which files are run, and what becomes of one that
fails.

What such a file prints goes to stderr: stdout belongs to the report.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from fp8doctor.errors import UserError
from fp8doctor.wording import error_in_words, escaped

MOST_FILES = 1000
"""Python files in a folder and those right below it; where there are more, it was hardly meant. A convention
of this tool."""

GROUP, OWN = "fp8doctor.checks", "fp8doctor.checks."
"""The group of entry points by which packages offer checks; how the modules of our own begin."""

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


def import_offered() -> None:
    """Import the checks that installed packages offer by an entry point of `GROUP`: a module that registers
    them.

    Raises `UserError` for one that cannot be imported.
    """
    if not offer_checks():
        return
    from importlib.metadata import entry_points

    for offered in entry_points(group=GROUP):
        try:
            with redirect_stdout(sys.stderr):
                offered.load()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            package = offered.dist.name if offered.dist else offered.value
            raise UserError(
                f"the installed package {escaped(package)} offers checks that cannot be imported "
                f"({escaped(offered.value)}); update or uninstall it: {error_in_words(error)}"
            ) from error


def offer_checks() -> bool:
    """Whether an installed package offers checks."""
    return any(map(_offers_checks, sys.path))


def _offers_checks(folder: str) -> bool:
    """Whether a package that is installed there has such an entry point, by its text: to import what reads
    metadata takes longer than a start may."""
    with suppress(OSError):
        for file in Path(folder or ".").glob("*.*-info/entry_points.txt"):
            if GROUP.encode() in file.read_bytes():
                return True
    return False


def output_of(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Where a check may print: a third party's on stderr."""
    return nullcontext() if function.__module__.startswith(OWN) else redirect_stdout(sys.stderr)


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
