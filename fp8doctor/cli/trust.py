"""Whose files a project's settings come from: those of another user are never taken, as git takes none.

A project's settings name checks and an interpreter, which run as the user. So their files have to belong to
the user, to root, or under sudo to the user who typed it, and nobody else may be able to write or swap them.
Access by group is not looked at: many systems give every user a group of their own.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_LINKS = 40
"""Symbolic links that are followed one after the other, as Linux does."""

RUN = ("*.py", "[!._]*/*.py", "__pycache__", "__pycache__/*", "[!._]*/__pycache__", "[!._]*/__pycache__/*")
"""What is run of a folder of checks, and what Python has compiled of it."""


def distrusted(path: Path) -> str | None:
    """Say why a file or folder is not trusted and what to type; None if it is trusted, or does not exist."""
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
    """Say why the checks in a folder are not trusted: the files that would be run, and their folders."""
    why = distrusted(folder)
    with suppress(OSError):
        for pattern in RUN:
            why = why or next(filter(None, map(distrusted, folder.glob(pattern))), None)
    return why


def distrusted_interpreter(path: Path) -> str | None:
    """Say why an interpreter, or the one of an environment's folder, is not trusted."""
    return distrusted(path) or distrusted(path / "bin" / "python")


def _links(path: Path) -> Iterator[Path]:
    """The path, and what it links to, one after the other."""
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
    """Why a file and the folder that it is in are not the user's alone."""
    for each in (path, path.parent):
        status = each.lstat() if each == path else each.stat()
        if status.st_uid not in _trusted():
            name = shlex.quote(str(each))
            return (
                f"{each} belongs to {_name(status.st_uid)}, who could run code as you. If you trust it, take "
                f"it over: chown {_name(os.geteuid())} {name}"
            )
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"every user may write to {each}. {_closed(each, status.st_mode)}"
    return None


def _swappable(path: Path) -> str | None:
    """Why another user could put something else in this place: a folder above it is open to all. In one with
    the sticky bit, such as /tmp, only owners move what they own."""
    for each in path.parents:
        mode = each.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"every user may write to {each}. {_closed(each, mode)}"
    return None


def _closed(path: Path, mode: int) -> str:
    """What to do about a file or folder that every user may write to."""
    if stat.S_ISDIR(mode) and mode & stat.S_ISVTX:
        return "Move the project into a folder of your own"
    return f"To take it, type: chmod o-w {shlex.quote(str(path))}"


def _trusted() -> set[int]:
    """Who may decide what this process runs. Root could change the Python that runs it."""
    user = os.geteuid()
    asked = os.environ.get("SUDO_UID", "") if user == 0 else ""
    return {0, user, *([int(asked)] if asked.isdecimal() else [])}


def _name(user: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
