"""Define the commands' options and check their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.console import show_page
from fp8doctor.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

Command = Callable[..., Any]

FORMATS = ("text", "json", "markdown", "html", "github", "junit")

HELP_ALL = "fp8doctor.help_all"
"""Key in click's context: the help shows every option."""


class Rare(click.Option):
    """An option that only ``--help-all`` shows."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        return super().get_help_record(ctx) if ctx.meta.get(HELP_ALL) else None


def help_all(command: click.Command) -> None:
    """Add ``--help-all`` to a command that has rare options."""

    def show(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[HELP_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options and exit.",
    )(command)


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


def positive(
    ctx: click.Context, parameter: click.Parameter, value: float | None, unit: str = ""
) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a positive number{unit}", ctx, parameter)
    return value


seconds = functools.partial(positive, unit=" of seconds")


def number(name: str, metavar: str, help: str, callback: Any = positive, **settings: Any) -> Any:
    """Define an option that takes a positive number."""
    return click.option(name, type=float, metavar=metavar, callback=callback, help=help, **settings)


def count(name: str, help: str, least: int = 1, **settings: Any) -> Any:
    """Define an option that takes a whole number."""
    return click.option(name, type=click.IntRange(min=least), metavar="N", help=help, **settings)


def fail_on(default: str, help: str) -> Any:
    """Define the option for the severity that makes a command fail."""
    severities = click.Choice(("never", *SEVERITIES))
    return click.option(
        "--fail-on", metavar="SEVERITY", type=severities, default=default, show_default=True, help=help
    )


def gpu(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Find the GPU's name in the table of datasheets."""
    from fp8doctor.gpus import gpu_spec

    return gpu_spec(value).name if value is not None else None


def version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        show_page(f"fp8doctor {VERSION}")
        ctx.exit()


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds options in the order of the help."""

    def add(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def checks(kind: type[click.Option]) -> Any:
    """Define the option that adds folders of checks."""
    return click.option(
        "--checks",
        cls=kind,
        multiple=True,
        metavar="DIR",
        type=READ,
        help="Also use the checks in this folder and its direct subfolders; repeatable.",
    )


SELECT = click.option(
    "--select",
    cls=Rare,
    multiple=True,
    metavar="CODES",
    callback=codes,
    help="Run only these checks: codes or prefixes (CMP001,SHP), comma-separated; repeatable.",
)

IGNORE = click.option(
    "--ignore",
    cls=Rare,
    multiple=True,
    metavar="CODES",
    callback=codes,
    help="Skip these checks: codes or prefixes, comma-separated; repeatable.",
)


def report_options(stream: str, fails_on: str) -> Callable[[Command], Command]:
    """Return the options of a reporting command, with its stream and ``--fail-on``."""
    return with_options(
        click.option(
            "--format",
            metavar="FORMAT",
            type=click.Choice(FORMATS),
            help="text, json, markdown, html, github or junit. Default: by the suffix of -o, else text.",
        ),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            type=FILE,
            multiple=True,
            help=f"Write to a file instead of {stream}; repeatable.",
        ),
        click.option(
            "--save",
            metavar="FILE",
            type=FILE,
            help="Also save the report, to show or compare it later.",
        ),
        SELECT,
        IGNORE,
        fail_on(fails_on, "Exit with 1 from this severity on: never, info, warning or error."),
        click.option(
            "--assume-gpu",
            metavar="NAME",
            callback=gpu,
            help="Estimate for this GPU, such as H100 or b200.",
        ),
        checks(Rare),
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Also show every check and what libraries printed.",
        ),
        click.option(
            "-q",
            "--quiet",
            cls=Rare,
            is_flag=True,
            help="Show no progress, and only the verdict, warnings and errors.",
        ),
    )


output_options = report_options("stdout", "error")

STRICT = click.option(
    "--strict",
    cls=Rare,
    is_flag=True,
    help="Exit with 1 if nothing was measured on a GPU, or the times are too noisy to compare.",
)

gate_options = with_options(
    click.option(
        "--require-fp8",
        cls=Rare,
        is_flag=True,
        help="Exit with 1 if no layer trains in FP8, if FP8 is emulated, raises or does not learn, or if "
        "fp8doctor cannot tell.",
    ),
    number(
        "--min-speedup",
        "X",
        "Exit with 1 unless FP8 is measured at X times BF16.",
    ),
    number(
        "--min-estimated-speedup",
        "X",
        "Without a GPU: exit with 1 if FP8 is estimated below X times the best BF16, or cannot be "
        "estimated. A time measured on a GPU replaces the estimate.",
        cls=Rare,
    ),
    STRICT,
    click.option(
        "--baseline",
        cls=Rare,
        metavar="FILE",
        type=READ,
        help="Exit with 1 if the step is slower than in this saved report by more than "
        "--max-regression (5%).",
    ),
    number(
        "--max-regression",
        "PCT",
        "Allowed regression against --baseline, in percent of the step time.",
        cls=Rare,
    ),
)

list_options = with_options(
    click.option(
        "--format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="Format of the output.",
    ),
    checks(click.Option),
)
