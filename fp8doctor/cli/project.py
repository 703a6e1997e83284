"""Read default options from ``[tool.fp8doctor]`` in pyproject.toml, unless it is another user's."""

import os
import stat
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from fp8doctor.cli.console import complain
from fp8doctor.errors import UserError
from fp8doctor.wording import did_you_mean, error_in_words

TABLE = "tool.fp8doctor"

GATE = (
    *("fail-on", "require-fp8", "min-speedup", "min-estimated-speedup", "strict", "baseline"),
    "max-regression",
)
"""Keys that decide the exit code."""

KEYS = ("select", "ignore", *GATE, "assume-gpu", "budget", "load-timeout", "batch", "seq", "layers", "device")
"""Every key except ``ignore`` is the option with that name."""


class Project(NamedTuple):
    """A project's options."""

    file: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    """Name of a click parameter -> its value, without the ignored codes."""
    ignored: Mapping[str, str] = MappingProxyType({})
    """Code or prefix -> reason."""


class ProjectCommand(click.Command):
    """A command whose defaults a project may set; codes that it or the command line ignores are ignored.

    A project's gates do not apply to a script, whose exit code is its own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # a shell completes a line
            return rest
        words = (ctx.params.get("target", ""), *ctx.params.get("script", ())[:1])
        named = (name for word in words for name in (word, word.rpartition(":")[0]))
        project = project_near(next(filter(os.path.isfile, named), ""))
        for each in self.params:
            name = str(each.name)
            key = name.replace("_", "-")
            is_default = ctx.get_parameter_source(name) is ParameterSource.DEFAULT
            if is_default and name in project.options and not (key in GATE and "script" in ctx.params):
                try:
                    ctx.params[name] = each.process_value(ctx, project.options[name])
                except click.BadParameter as error:
                    raise UserError(f"{project.file}: [{TABLE}] {key}: {error.message}") from None
        if "ignore" in ctx.params:
            ctx.params["ignore"] = (*ctx.params["ignore"], *project.ignored)
            ctx.params["reasons"] = project.ignored
        return rest


def project_near(file: str) -> Project:
    """Read the nearest pyproject.toml with the table, up from a file and from here. Raises `UserError`."""
    from pathlib import Path

    above = (
        each for name in (file, "pyproject.toml") if name for each in Path(os.path.abspath(name)).parents
    )
    for folder in dict.fromkeys(above):
        path = str(folder / "pyproject.toml")
        if (table := _table(path)) is not None:
            return Project(path, dict(_options(path, table)), _ignored(path, table.get("ignore", {})))
    return Project()


def _table(file: str) -> dict[str, Any] | None:
    """Read a file's table; None if it has none, or is another user's."""
    import tomllib

    try:
        with open(file, "rb") as opened:
            content = opened.read()
        status, user = os.stat(file), os.geteuid()
    except OSError:
        return None
    asked = os.environ.get("SUDO_UID", "") if user == 0 else ""
    ours = {0, user, *([int(asked)] if asked.isdecimal() else [])}
    is_foreign = status.st_uid not in ours or bool(status.st_mode & stat.S_IWOTH)
    try:
        table = tomllib.loads(content.decode()).get("tool", {}).get("fp8doctor")
    except (ValueError, AttributeError) as error:
        if is_foreign or b"fp8doctor" not in content:
            return None
        raise UserError(f"cannot read {file}: {error_in_words(error)}") from None
    if table is not None and is_foreign:
        complain(f"fp8doctor ignores {file}: another user owns it or may write to it")
        return None
    if not isinstance(table, dict | None):
        raise UserError(f"{file}: [{TABLE}] is not a table")
    return table


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
