"""Read default options from ``[tool.fp8doctor]`` in pyproject.toml, unless it is another user's."""

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from fp8doctor.cli.console import complain
from fp8doctor.errors import UserError
from fp8doctor.wording import did_you_mean, error_in_words

TABLE = "tool.fp8doctor"

GATE = {
    key.replace("-", "_"): key
    for key in (
        *("fail-on", "require-fp8", "min-speedup", "min-estimated-speedup", "strict", "baseline"),
        "max-regression",
    )
}
"""Parameters that decide the exit code, with their keys."""

KEYS = (
    *("select", "ignore", *GATE.values(), "assume-gpu", "budget", "load-timeout", "batch", "seq", "layers"),
    "device",
)
"""Every key except ``ignore`` is the option with that name."""


class Project(NamedTuple):
    """A project's options."""

    file: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    """Name of a click parameter -> its value, without the ignored codes."""
    ignored: Mapping[str, str] = MappingProxyType({})
    """Code or prefix -> reason."""


class ProjectCommand(click.Command):
    """A command whose defaults a project may set; codes that it or the command line ignores are ignored."""

    of_the_gate = True
    """True if the project's ``fail-on`` and gates apply."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes a line
            return super().parse_args(ctx, args)
        project = project_near(self.near(ctx, args))
        ctx.default_map = {
            name: value for name, value in project.options.items() if self.of_the_gate or name not in GATE
        }
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = str(error.param.name) if error.param else ""
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
                raise
            key = name.replace("_", "-")
            raise UserError(f"{project.file}: [{TABLE}] {key}: {error.message}") from None
        if "ignore" in ctx.params:
            ctx.params["ignore"] = (*ctx.params["ignore"], *project.ignored)
            ctx.params["reasons"] = project.ignored
        return rest

    def near(self, ctx: click.Context, args: list[str]) -> str:
        """Find the file whose project it is; empty for the current folder's."""
        return ""


class Ungated(ProjectCommand):
    """A command without one report, which is what a project's gates judge."""

    of_the_gate = False


def project_near(file: str, say: Callable[[str], None] = complain) -> Project:
    """Read the nearest pyproject.toml with the table, up from a file and from here. Raises `UserError`."""
    for folder in dict.fromkeys((*(_above(file) if file else ()), *_above("pyproject.toml"))):
        if (project := _read(os.path.join(folder, "pyproject.toml"), say)) is not None:
            return project
    return Project()


def _above(file: str) -> Iterator[str]:
    """Yield the folders above a file, the nearest first."""
    inside = os.path.abspath(file)
    while (folder := os.path.dirname(inside)) != inside:
        yield folder
        inside = folder


def _read(file: str, say: Callable[[str], None]) -> Project | None:
    """Read one file; None if it has no such table or is not trusted."""
    try:
        with open(file, "rb") as opened:
            content = opened.read()
    except OSError:
        return None
    if b"fp8doctor" not in content:
        return None
    import tomllib

    try:
        table = tomllib.loads(content.decode()).get("tool", {}).get("fp8doctor")
    except (ValueError, AttributeError) as error:
        if _is_foreign(file):
            return None
        from fp8doctor.facts.scrub import scrub

        raise UserError(f"cannot read {file}: {scrub(error_in_words(error))}") from None
    if table is None:
        return None
    if _is_foreign(file):
        say(f"fp8doctor ignores {file}: another user owns it or may write to it")
        return None
    if not isinstance(table, dict):
        raise UserError(f"{file}: [{TABLE}] is not a table")
    return Project(file, dict(_options(file, table)), _ignored(file, table.get("ignore", {})))


def _is_foreign(file: str) -> bool:
    """Return whether another user owns a file or may write to it."""
    status, user = os.stat(file), os.geteuid()
    asked = os.environ.get("SUDO_UID", "") if user == 0 else ""
    ours = {0, user, *([int(asked)] if asked.isdecimal() else [])}
    return status.st_uid not in ours or bool(status.st_mode & stat.S_IWOTH)


def _options(file: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield options as they would be typed; click checks them. Raises `UserError` for a wrong key."""
    for key, value in table.items():
        if key not in KEYS:
            keys = ", ".join(KEYS)
            meant = did_you_mean(key.replace("_", "-"), KEYS)
            raise UserError(f"{file}: [{TABLE}] has no key {key!r}; its keys are {keys}{meant}")
        if key == "select":
            yield key, [str(each) for each in (value if isinstance(value, list) else [value])]
        elif key != "ignore":
            typed = os.path.join(os.path.dirname(file), str(value)) if key == "baseline" else str(value)
            yield key.replace("-", "_"), typed


def _ignored(file: str, table: Any) -> dict[str, str]:
    """Read the ignored codes with their reasons. Raises `UserError` for one without."""
    from fp8doctor.facts.scrub import scrub

    for code, reason in table.items() if isinstance(table, dict) else [("CODE", None)]:
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f'{file}: [{TABLE}.ignore] {code} needs a reason: {code} = "why it is ignored"')
    return {code.upper(): scrub(" ".join(reason.split())) for code, reason in table.items()}
