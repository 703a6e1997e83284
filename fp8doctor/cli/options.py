"""Define the commands' options and check their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fp8doctor.areas import SEVERITIES
from fp8doctor.cli.console import show_page
from fp8doctor.cli.delivery import FORMATS
from fp8doctor.gpus import GPUS, gpu_spec
from fp8doctor.version import VERSION

Command = Callable[..., Any]


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
    return click.option("--fail-on", type=severities, default=default, show_default=True, help=help)


def gpu(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Find the GPU's name in the table of datasheets."""
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


CHECKS = click.option(
    "--checks",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Also run the checks in this folder and its direct subfolders; repeatable.",
)

SELECT = click.option(
    "--select",
    multiple=True,
    metavar="CODES",
    callback=codes,
    help="Run only these checks: codes or prefixes (CMP001,SHP), comma-separated; repeatable.",
)

IGNORE = click.option(
    "--ignore",
    multiple=True,
    metavar="CODES",
    callback=codes,
    help="Skip these checks: codes or prefixes, comma-separated; repeatable.",
)

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def report_options(stream: str, fails_on: str) -> Callable[[Command], Command]:
    """Return the options of a reporting command, with its stream and ``--fail-on``."""
    return with_options(
        click.option(
            "--format",
            type=click.Choice(FORMATS),
            help="Format of the report. Default: from the suffix of -o (.txt, .json, .md, .html, .xml for "
            "junit, .github), else text.",
        ),
        click.option(
            "-o",
            "--output",
            metavar="FILE",
            type=FILE,
            multiple=True,
            help=f"Write the report to a file instead of {stream}; repeatable.",
        ),
        click.option(
            "--save",
            metavar="FILE",
            type=FILE,
            help="Also save the report as JSON, for 'fp8doctor report FILE'.",
        ),
        SELECT,
        IGNORE,
        fail_on(fails_on, "Exit with 1 on a finding of this severity or higher."),
        click.option(
            "--assume-gpu",
            metavar="NAME",
            callback=gpu,
            help=f"Estimate for this GPU: {', '.join(spec.name for spec in GPUS)}, in any case.",
        ),
        CHECKS,
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Also show the outcome of every check with its reason, and what libraries printed.",
        ),
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            help="Show no progress, and only the verdict, warnings and errors.",
        ),
    )


output_options = report_options("stdout", "error")

STRICT = click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if nothing was measured on a GPU, or the times are too noisy to compare.",
)

gate_options = with_options(
    click.option(
        "--require-fp8",
        is_flag=True,
        help="Exit with 1 if no layer trains in FP8, if FP8 is emulated, raises or does not learn, or if "
        "fp8doctor cannot tell.",
    ),
    number(
        "--min-speedup",
        "X",
        "Exit with 1 if FP8 is measured below X times the best BF16, or was not measured on a GPU.",
    ),
    number(
        "--min-estimated-speedup",
        "X",
        "Without a GPU: exit with 1 if FP8 is estimated below X times the best BF16, or cannot be "
        "estimated. A time measured on a GPU replaces the estimate.",
    ),
    STRICT,
    click.option(
        "--baseline",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Exit with 1 if the step is slower than in this saved report by more than "
        "--max-regression (5%).",
    ),
    number("--max-regression", "PCT", "Allowed regression against --baseline, in percent of the step time."),
)

list_options = with_options(
    click.option(
        "--format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="Format of the output.",
    ),
    CHECKS,
)
