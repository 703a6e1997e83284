"""Refuse a project's settings if another user controls the files, as git does.

A project's settings name checks and an interpreter, which run as the user. Their files must belong to the
user, to root, or under sudo to the user who typed it, and nobody else may be able to write or replace them.
Group access is ignored: many systems give every user their own group.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_LINKS = 40
"""Symbolic links to follow in a row. Source: Linux's own limit."""

RUN = ("*.py", "[!._]*/*.py", "__pycache__", "__pycache__/*", "[!._]*/__pycache__", "[!._]*/__pycache__/*")
"""Files in a folder of checks that are run, and Python's compiled versions of them."""


def distrusted(path: Path) -> str | None:
    """Explain why a path is not trusted and what to type; None if it is."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        for each in _links(path):
            if why := _not_ours(each) or _swappable(each):
                return why
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None


def distrusted_checks(folder: Path) -> str | None:
    """Explain why the checks in a folder, or their folders, are not trusted."""
    why = distrusted(folder)
    with suppress(OSError):
        for pattern in RUN:
            why = why or next(filter(None, map(distrusted, folder.glob(pattern))), None)
    return why


def distrusted_interpreter(path: Path) -> str | None:
    """Explain why an interpreter, or an environment's interpreter, is not trusted."""
    return distrusted(path) or distrusted(path / "bin" / "python")


def _links(path: Path) -> Iterator[Path]:
    """Yield the path, and each target of its links."""
    path = Path(os.path.abspath(path))
    for _ in range(MOST_LINKS):
        if not os.path.lexists(path):
            return
        yield path
        if not path.is_symlink():
            yield Path(os.path.realpath(path))
            return
        path = Path(os.path.abspath(path.parent / os.readlink(path)))


def _not_ours(path: Path) -> str | None:
    """Explain why a file or its folder is not under the user's control alone."""
    for each in (path, path.parent):
        status = each.lstat() if each == path else each.stat()
        if status.st_uid not in _trusted():
            name = shlex.quote(str(each))
            return (
                f"{each} belongs to {_name(status.st_uid)}, who could run code as you. If you trust it, make "
                f"it yours: chown {_name(os.geteuid())} {name}"
            )
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"every user may write to {each}. {_closed(each, status.st_mode)}"
    return None


def _swappable(path: Path) -> str | None:
    """Explain why another user could replace the path: a writable folder above it.

    In a folder with the sticky bit, such as /tmp, only owners can move their files.
    """
    for each in path.parents:
        mode = each.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may write to {each}. {_closed(each, mode)}"
    return None


def _closed(path: Path, mode: int) -> str:
    """Say how to close a file or folder that every user may write to."""
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return "Move the project into your own folder"
    return f"To use it, type: chmod o-w {shlex.quote(str(path))}"


def _trusted() -> set[int]:
    """Collect the users who may decide what this process runs, root among them."""
    user = os.geteuid()
    asked = os.environ.get("SUDO_UID", "") if user == 0 else ""
    return {0, user, *([int(asked)] if asked.isdecimal() else [])}


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
