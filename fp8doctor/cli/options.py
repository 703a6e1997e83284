"""The commands' options, and their defaults in a project's pyproject.toml, unless it is another user's."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.console import complain
from fp8doctor.errors import UserError
from fp8doctor.wording import did_you_mean, error_in_words

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = ("text", "json", "markdown", "html", "github", "junit")

HELP_ALL = "fp8doctor.help_all"
"""Key in click's context: the help shows every option."""

WORDS = "fp8doctor.words"
"""Key: the words behind ``fp8doctor``, the command first; an empty word means examining a target."""


class Rare(click.Option):
    """An option that only ``--help-all`` shows."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.meta.get(HELP_ALL) else None


def option(*names: str, help: str, takes: str = "", rare: bool = False, **settings: Any) -> click.Option:
    """Define an option that takes a value, called so in the help; or else a flag."""
    kind: dict[str, Any] = {"metavar": takes} if takes else {"is_flag": True}
    return (Rare if rare else click.Option)(names, help=help, **kind, **settings)


def choice(name: str, of: Sequence[str], help: str, *, rare: bool = False, **settings: Any) -> click.Option:
    """Define an option that takes one of these words, which its help shows."""
    return (Rare if rare else click.Option)((name,), type=click.Choice(of), help=help, **settings)


def help_all(command: click.Command) -> None:
    """Add ``--help-all`` to a command that has rare options."""

    def show(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[HELP_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    text = "Show all options and exit."
    command.params.append(option("--help-all", is_eager=True, expose_value=False, callback=show, help=text))


class PathOf(click.Path):
    """A path as ``Path``, which a help need not import."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from pathlib import Path

        return Path(str(super().convert(value, param, ctx)))


READ = PathOf()

FILE = PathOf(dir_okay=False, writable=True)


def codes(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Split repeated, comma-separated values into code prefixes."""
    prefixes = tuple(code.strip().upper() for value in values for code in value.split(",") if code.strip())
    if values and not prefixes:
        raise click.BadParameter("names no code", ctx, parameter)
    return prefixes


def positive(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a positive number", ctx, parameter)
    return value


def number(name: str, takes: str, help: str, **settings: Any) -> click.Option:
    return option(name, takes=takes, type=float, callback=positive, help=help, **settings)


def count(name: str, help: str, least: int = 1, **settings: Any) -> click.Option:
    return option(name, takes="N", type=click.IntRange(min=least), help=help, **settings)


def load_timeout(doing: str) -> click.Option:
    text = f"Stop if {doing} the model takes longer."
    return number("--load-timeout", "SECONDS", text, rare=True, default=600.0, show_default=True)


def fail_on(default: str, help: str) -> click.Option:
    severities = click.Choice(("never", *SEVERITIES))
    return option(
        "--fail-on", takes="SEVERITY", type=severities, default=default, show_default=True, help=help
    )


def gpu(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from fp8doctor.gpus import gpu_spec

    return gpu_spec(value).name if value is not None else None


def delivery_options(formats: Sequence[str], stream: str) -> tuple[click.Option, ...]:
    """Return the options that say how and where a page or a report is written."""
    words = f"{', '.join(formats[:-1])} or {formats[-1]}"
    return (
        option(
            "--format",
            takes="FORMAT",
            type=click.Choice(formats),
            help=f"{words}. Default: by the suffix of -o, else text.",
        ),
        option(
            "-o",
            "--output",
            takes="FILE",
            type=FILE,
            multiple=True,
            help=f"Write to a file instead of {stream}; repeatable.",
        ),
    )


def checks(*, rare: bool) -> click.Option:
    text = "Also use the checks in this folder and its direct subfolders; repeatable."
    return option("--checks", takes="DIR", type=READ, multiple=True, rare=rare, help=text)


def selection(name: str, help: str) -> click.Option:
    return option(name, takes="CODES", multiple=True, callback=codes, rare=True, help=help)


def report_options(stream: str, fails_on: str) -> tuple[click.Option, ...]:
    """Return the options of a reporting command, with its stream and ``--fail-on``."""
    return (
        *delivery_options(FORMATS, stream),
        option("--save", takes="FILE", type=FILE, help="Also save the report, to show or compare it later."),
        selection(
            "--select", "Run only these checks: codes or prefixes (CMP001,SHP), comma-separated; repeatable."
        ),
        selection("--ignore", "Skip these checks: codes or prefixes, comma-separated; repeatable."),
        fail_on(fails_on, "Exit with 1 from this severity on: never, info, warning or error."),
        option(
            "--assume-gpu",
            takes="NAME",
            callback=gpu,
            help="Estimate for this GPU, such as b200. Without a GPU: H100.",
        ),
        checks(rare=True),
        option("-v", "--verbose", help="Also show every check and what libraries printed."),
        option(
            "-q", "--quiet", rare=True, help="Show no progress, and only the verdict, warnings and errors."
        ),
    )


output_options = report_options("stdout", "error")

STRICT = option(
    "--strict",
    rare=True,
    help="Exit with 1 if nothing was measured on a GPU, or the times are too noisy to compare.",
)

gate_options = (
    option(
        "--require-fp8",
        rare=True,
        help="Exit with 1 if no layer trains in FP8, if FP8 is emulated, raises or does not learn, or if "
        "fp8doctor cannot tell.",
    ),
    number("--min-speedup", "X", "Exit with 1 unless FP8 is measured at X times BF16."),
    number(
        "--min-estimated-speedup",
        "X",
        "Without a GPU: exit with 1 if FP8 is estimated below X times the best BF16, or cannot be "
        "estimated. A time measured on a GPU replaces the estimate.",
        rare=True,
    ),
    STRICT,
    option(
        "--baseline",
        takes="FILE",
        type=READ,
        rare=True,
        help="Exit with 1 if the step is slower than in this saved report by over --max-regression (5%).",
    ),
    number(
        "--max-regression",
        "PCT",
        "Allowed regression against --baseline, in percent of the step time.",
        rare=True,
    ),
)

list_options = (
    choice("--format", ("text", "json"), "Format of the output.", default="text", show_default=True),
    checks(rare=False),
)


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
            return Project(path, dict(_typed(path, table)), _ignored_in(path, table.get("ignore", {})))
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


def _typed(file: str, table: dict[str, Any]) -> Iterator[tuple[str, Any]]:
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


def _ignored_in(file: str, table: Any) -> dict[str, str]:
    """Read the ignored codes with their reasons. Raises `UserError` for one without."""
    from fp8doctor.facts.scrub import scrub

    for code, reason in table.items() if isinstance(table, dict) else [("CODE", None)]:
        if not isinstance(reason, str) or not reason.strip():
            raise UserError(f'{file}: [{TABLE}.ignore] {code} needs a reason: {code} = "why it is ignored"')
    return {code.upper(): scrub(" ".join(reason.split())) for code, reason in table.items()}
