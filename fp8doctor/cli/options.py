"""Define the commands' options and check their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.areas import SEVERITIES

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
