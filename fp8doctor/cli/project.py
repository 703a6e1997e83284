"""Read default options from ``[tool.fp8doctor]`` in pyproject.toml, if the file can be trusted."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from fp8doctor.cli.arguments import first_word, options_with_value
from fp8doctor.cli.console import complain
from fp8doctor.errors import UserError
from fp8doctor.wording import error_in_words

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
        if status.st_uid not in _trusted_users():
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


def _trusted_users() -> set[int]:
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


TABLE = "tool.fp8doctor"

KINDS: dict[str, tuple[type, ...]] = {
    "select": (str, list),
    "ignore": (dict,),
    "checks": (str, list),
    "fail-on": (str,),
    "require-fp8": (bool,),
    "min-speedup": (int, float),
    "min-estimated-speedup": (int, float),
    "strict": (bool,),
    "baseline": (str,),
    "max-regression": (int, float),
    "assume-gpu": (str,),
    "budget": (int, float),
    "load-timeout": (int, float),
    "batch": (int,),
    "seq": (int,),
    "layers": (int,),
    "device": (str,),
    "python": (str,),
}
"""Key -> allowed TOML types. Every key except ``ignore`` is the option with that name."""

GATE = (
    "fail_on",
    "require_fp8",
    "min_speedup",
    "min_estimated_speedup",
    "strict",
    "baseline",
    "max_regression",
)
"""Parameters that decide the exit code."""

PATHS = ("checks", "baseline", "python")
"""Keys whose values are paths, relative to the file's folder."""

CODE = {"checks": "--checks DIR", "python": "--python PATH"}
"""Keys whose values are code to run -> the option to type instead."""

LARGEST = 2**20
"""Bytes of the largest pyproject.toml to read."""

NAMES = {
    str: "a text",
    list: "a list of texts",
    dict: "a table",
    bool: "true or false",
    int: "a whole number",
}


class Project(NamedTuple):
    """A project's options."""

    file: Path | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    """Name of a click parameter -> its value, without the ignored codes."""
    ignored: Mapping[str, str] = MappingProxyType({})
    """Code or prefix -> reason."""


class ProjectCommand(click.Command):
    """A command whose default options a project may set.

    The command line comes first. Codes ignored by either are ignored.
    """

    of_the_gate = True
    """True if the project's ``fail-on`` and gates apply."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        project = project_near(self.near(ctx, args), say=_silent if ctx.resilient_parsing else complain)
        ctx.default_map = {
            name: value
            for name, value in project.options.items()
            if (self.of_the_gate or name not in GATE) and not self.is_left(ctx, project, name, args)
        }
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param else None
            if name not in ctx.default_map or _is_named(error.param, args):
                raise
            key = str(name).replace("_", "-")
            raise UserError(f"{project.file}: [{TABLE}] {key}: {error.message}") from None
        if "ignore" in ctx.params:
            ctx.params["ignore"] = (*ctx.params["ignore"], *project.ignored)
            ctx.params["reasons"] = project.ignored
        return rest

    def near(self, ctx: click.Context, args: list[str]) -> Path:
        """Find the folder to search for a project from: the target's, if it is a file."""
        return _here()

    def runs_code_of(self, project: Project) -> bool:
        """Return whether project code may run; without a target only the current folder's."""
        return project.file is not None and project.file.parent == _here()

    def is_left(self, ctx: click.Context, project: Project, name: str, args: list[str]) -> bool:
        """Tell whether to skip an option because it is code, and warn if it would matter."""
        if name not in CODE or self.runs_code_of(project):
            return False
        parameter = next((each for each in self.params if each.name == name), None)
        if parameter is not None and not _is_named(parameter, args) and not ctx.resilient_parsing:
            complain(
                f"{project.file}: fp8doctor ignores {name}, because this command does not name the project. "
                f"To use it, type {CODE[name]}"
            )
        return True


class Ungated(ProjectCommand):
    """A command without one report, which is what a project's gates judge."""

    of_the_gate = False


class ReplayCommand(ProjectCommand):
    """A command that reads a saved report and runs no project code."""

    def runs_code_of(self, project: Project) -> bool:
        return False


class TargetCommand(ProjectCommand):
    """A command with a target, which decides the project."""

    def runs_code_of(self, project: Project) -> bool:
        return True

    def near(self, ctx: click.Context, args: list[str]) -> Path:
        at = first_word(args, set(options_with_value(self)))
        if at is None:
            return _here()
        for name in (args[at], args[at].rpartition(":")[0]):
            if os.path.isfile(name):  # of any name: Path.is_file raises where it is too long
                return Path(name).absolute().parent
        return _here()


def _is_named(parameter: click.Parameter | None, args: list[str]) -> bool:
    names = parameter.opts if parameter else []
    return any(arg.partition("=")[0] in names for arg in args)


def project_near(folder: Path, say: Callable[[str], None] = complain) -> Project:
    """Read the nearest pyproject.toml with the table, from this folder up.

    Else from the current one. Raises `UserError` for an unreadable table. Names and ignores files of other
    users.
    """
    for each in dict.fromkeys((*_upwards(folder), *_upwards(_here()))):
        if (project := _read(each / "pyproject.toml", say)) is not None:
            return project
    return Project()


def _silent(sentence: str) -> None:
    """Say nothing, while a shell completes a line."""


def _here() -> Path:
    """Find the current folder; an empty path if it was deleted."""
    try:
        return Path.cwd()
    except OSError:
        return Path()


def _upwards(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.parents


def _read(file: Path, say: Callable[[str], None]) -> Project | None:
    """Read one file; None if it has no such table or is not trusted."""
    try:
        if not file.is_file() or file.stat().st_size > LARGEST:
            return None
        content = file.read_bytes()
    except OSError:
        return None
    if b"fp8doctor" not in content:
        return None
    import tomllib

    why = distrusted(file)

    try:
        table = tomllib.loads(content.decode()).get("tool", {}).get("fp8doctor")
    except (ValueError, AttributeError) as error:
        if why is not None:
            return None
        from fp8doctor.facts.scrub import scrub

        raise UserError(f"cannot read {file}: {scrub(error_in_words(error))}") from None
    if table is None:
        return None
    if why is not None:
        say(f"fp8doctor ignores {file}: {why}")
        return None
    if not isinstance(table, dict):
        raise UserError(f"{file}: [{TABLE}] is not a table")
    options = dict(_trusted(file, _options(file, table), say))
    return Project(file, options, _ignored(file, table.get("ignore", {})))


def _trusted(
    file: Path, options: Iterable[tuple[str, Any]], say: Callable[[str], None]
) -> Iterator[tuple[str, Any]]:
    """Drop code that another user owns or can write, and name it."""
    for name, value in options:
        if name == "checks":
            why = next(filter(None, (distrusted_checks(Path(each)) for each in value)), None)
        else:
            why = distrusted_interpreter(Path(value)) if name == "python" and _is_path(value) else None
        if why is None:
            yield name, value
        else:
            say(f"{file}: fp8doctor ignores {name}: {why}")


def _options(file: Path, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a table's options for click. Raises `UserError` for a wrong key or type."""
    for key, value in table.items():
        if key not in KINDS:
            keys = ", ".join(KINDS)
            raise UserError(f"{file}: [{TABLE}] has no key {key!r}{_alike(key)}; its keys are {keys}")
        kinds = KINDS[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = "a number" if float in kinds else " or ".join(NAMES[kind] for kind in kinds)
            raise UserError(f"{file}: [{TABLE}] {key} is {wanted}, not {value!r}")
        if key != "ignore":
            yield (
                key.replace("-", "_"),
                _several(file, key, value) if list in kinds else _one(file, key, value),
            )


def _several(file: Path, key: str, value: Any) -> list[Any]:
    values = [value] if isinstance(value, str) else value
    if not all(isinstance(each, str) for each in values):
        raise UserError(f"{file}: [{TABLE}] {key} is a list of texts")
    return [_one(file, key, each) for each in values]


def _one(file: Path, key: str, value: Any) -> Any:
    """Convert a value; a path is relative to the file's folder, a bare command is not."""
    is_path = key in PATHS and (key != "python" or _is_path(value))
    return str(file.parent / value) if is_path else value


def _is_path(python: str) -> bool:
    """Tell whether an interpreter is given by its path, not as a command."""
    import shutil

    return "/" in python or shutil.which(python) is None


def _ignored(file: Path, table: Any) -> dict[str, str]:
    """Read the ignored codes with their reasons. Raises `UserError` for one without."""
    from fp8doctor.facts.scrub import scrub

    for code, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f'{file}: [{TABLE}.ignore] {code} needs a reason: {code} = "why it is ignored"')
    return {code.upper(): scrub(" ".join(reason.split())) for code, reason in table.items()}


def _alike(key: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(key.replace("_", "-"), KINDS, 1)
    return f" (did you mean {near[0]}?)" if near else ""
