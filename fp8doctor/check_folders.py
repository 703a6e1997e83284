"""Third-party checks from folders and installed packages.

Whatever such a file prints goes to stderr: stdout belongs to the report.
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
"""Most Python files in a folder and its subfolders; more is probably a mistake.

A convention of this tool.
"""

GROUP, OWN = "fp8doctor.checks", "fp8doctor.checks."
"""Entry point group for packages that offer checks; prefix of our own modules."""

PREFIX = "fp8doctor_checks_"
"""Prefix of the module names for imported files."""


def import_folder(folder: Path) -> None:
    """Run the Python files of a folder and its subfolders, each once per process.

    Raises `UserError` if the folder does not exist or holds too many files, or if a file cannot be imported.
    """
    if not folder.is_dir():
        raise UserError(f"--checks {escaped(str(folder))}: no such folder")
    if folder.resolve() == Path(folder.resolve().anchor):
        raise UserError(f"--checks {folder}: that is the root of the file system; name the folder of checks")
    for path in _files(folder):
        _import(path)


def import_offered() -> None:
    """Import the checks that installed packages offer as an entry point of `GROUP`.

    Raises `UserError` if one cannot be imported.
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
    """Check whether an installed package offers checks."""
    return any(map(_offers_checks, sys.path))


def _offers_checks(folder: str) -> bool:
    """Check whether a package installed in this folder has such an entry point.

    Reads the text: importing a metadata reader takes too long at start-up.
    """
    with suppress(OSError):
        for file in Path(folder or ".").glob("*.*-info/entry_points.txt"):
            if GROUP.encode() in file.read_bytes():
                return True
    return False


def output_of(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Send a third-party check's output to stderr."""
    return nullcontext() if function.__module__.startswith(OWN) else redirect_stdout(sys.stderr)


def _files(folder: Path) -> list[Path]:
    """List regular files that are neither hidden nor private."""
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
