"""The command line: reads arguments, examines in a worker, delivers the report, exits. Imports neither torch
nor the user's code."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.console import (
    complain,
    complain_of_ourselves,
    progress,
    show,
    show_json,
    show_page,
    wants_ascii,
    wants_colour,
)
from fp8doctor.cost import GPUS, gpu_spec
from fp8doctor.errors import UserError
from fp8doctor.finding import SEVERITIES, Severity

if TYPE_CHECKING:
    from fp8doctor.diagnosis.document import Document
    from fp8doctor.registry import Check

FORMATS = ("text", "json", "markdown")
FORMAT_OF_SUFFIX = {".txt": "text", ".json": "json", ".md": "markdown"}
PLAIN_SUFFIXES = ("", ".log", ".out")

OK, FOUND, FAILED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: nothing grave, findings at or above ``--fail-on``, no complete report, Ctrl-C."""

WIDEST = 100
"""Columns of a report on a wide terminal, in a pipe or in a file."""

DEMO = Path(__file__).with_name("demo.json")

Command = Callable[..., Any]


class Commands(click.Group):
    """``fp8doctor model.py``, ``fp8doctor env``, ...: without a command word the target is examined."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = first_word(
            args, {name for command in self.commands.values() for name in options_with_value(command)}
        )
        if at is None or args[at] not in self.commands:
            return super().parse_args(ctx, ["", *args])
        return super().parse_args(ctx, [args[at], *args[:at], *args[at + 1 :]])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) if cmd_name else examine

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any
    ) -> Any:
        """Run a command and exit with its code; every exception becomes a sentence. Without a word it is the
        help, and wrong usage."""
        args = sys.argv[1:] if args is None else args
        try:
            code = super().main(
                args or ["--help"],
                "fp8doctor",
                *rest,
                **{**extra, "standalone_mode": False, "max_content_width": WIDEST},
            )
        except click.Abort:
            complain("interrupted")
            code = INTERRUPTED
        except click.ClickException as error:
            error.show()
            code = FAILED
        except UserError as error:
            complain(str(error), error.detail)
            code = FAILED
        except Exception as error:
            complain_of_ourselves(error, verbose=bool({"-v", "--verbose"}.intersection(args)))
            code = FAILED
        sys.exit(code if args else FAILED)


class Examine(click.Command):
    """The command that has no name: in its usage and errors it is ``fp8doctor`` itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        return super().make_context(
            parent.info_name if parent else info_name, args, max_content_width=WIDEST, **extra
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Other commands"):
            formatter.write_dl(
                [
                    (" ".join((name, *command.collect_usage_pieces(ctx)[1:])), command.get_short_help_str(80))
                    for name, command in main.commands.items()
                ]
            )
        super().format_options(ctx, formatter)


def options_with_value(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from parameter.opts


def first_word(args: Sequence[str], with_value: set[str]) -> int | None:
    """Where the first word stands that is neither an option nor the value of one."""
    is_value = False
    for at, arg in enumerate(args):
        if is_value:
            is_value = False
        elif arg == "--":
            return None
        elif arg.startswith("--"):
            is_value = arg in with_value
        elif arg.startswith("-") and len(arg) > 1:
            is_value = f"-{arg[-1]}" in with_value and not any(
                f"-{letter}" in with_value for letter in arg[1:-1]
            )
        else:
            return at
    return None


@click.group(cls=Commands)
def main() -> None:
    """Says why FP8 training is slower than BF16 on your GPU and your model, and what to change."""


# The options


def codes(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Code prefixes out of repeated, comma-separated values."""
    prefixes = tuple(code.strip().upper() for value in values for code in value.split(",") if code.strip())
    if values and not prefixes:
        raise click.BadParameter("names no code", ctx, parameter)
    return prefixes


def seconds(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a positive number of seconds", ctx, parameter)
    return value


def positive(ctx: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a positive number", ctx, parameter)
    return value


def gpu(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The name of the GPU as the table of datasheets spells it."""
    return gpu_spec(value).name if value is not None else None


def version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from fp8doctor.diagnosis.document import tool

        show_page(f"fp8doctor {tool().version}")
        ctx.exit()


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds options in the order in which the help shows them."""

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
    help="Also run the checks in this folder; repeatable.",
)
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

output_options = with_options(
    click.option(
        "--format",
        type=click.Choice(FORMATS),
        help="How to write the report; by default what the suffix of -o says (.txt, .json, .md), else text.",
    ),
    click.option(
        "-o", "--output", metavar="FILE", type=FILE, help="Write the report to a file instead of stdout."
    ),
    click.option(
        "--save", metavar="FILE", type=FILE, help="Also save the report as JSON, for 'fp8doctor report FILE'."
    ),
    click.option(
        "--select",
        multiple=True,
        metavar="CODES",
        callback=codes,
        help="Run only these checks: codes or how they begin, comma-separated; repeatable.",
    ),
    click.option("--ignore", multiple=True, metavar="CODES", callback=codes, help="Leave these checks out."),
    click.option(
        "--fail-on",
        type=click.Choice(("never", *SEVERITIES)),
        default="error",
        show_default=True,
        help="Exit with 1 on a finding this grave.",
    ),
    click.option(
        "--assume-gpu",
        metavar="NAME",
        callback=gpu,
        help=f"Model the costs of this GPU: {', '.join(spec.name for spec in GPUS)}, in any case.",
    ),
    CHECKS,
    click.option("-v", "--verbose", is_flag=True, help="Also say what became of every check, and why."),
    click.option(
        "-q",
        "--quiet",
        is_flag=True,
        help="No progress; only the verdict and findings that are at least a warning.",
    ),
)

list_options = with_options(
    click.option(
        "--format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="How to write it.",
    ),
    CHECKS,
)


# The commands


@click.command(
    cls=Examine,
    epilog="Exit codes: 0 nothing at or above --fail-on, 1 findings at or above it, 2 no complete report.",
)
@click.argument("target")
@with_options(
    click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Batch size of a made-up batch."),
    click.option(
        "--seq", type=click.IntRange(min=1), metavar="N", help="Sequence length of a made-up batch."
    ),
    click.option(
        "--layers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Ask build_model(layers=N) for a model of so many layers.",
    ),
    click.option(
        "--load-timeout",
        type=float,
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        callback=seconds,
        help="Longest time to load the model.",
    ),
    click.option("--no-trial", is_flag=True, help="Time nothing; savings are modelled."),
    click.option(
        "--budget",
        type=float,
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        callback=seconds,
        help="About how long the trial may take.",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help="Where to time: cuda (default), cuda:1, or cpu, which says nothing about a GPU.",
    ),
    click.option(
        "--trace",
        metavar="FILE",
        type=FILE,
        help="Keep the profile of the step (Chrome trace, .gz compresses), and others' beside it.",
    ),
    click.option(
        "--min-speedup",
        type=float,
        metavar="X",
        callback=positive,
        help="Exit with 1 when FP8 is measured below X times the best BF16.",
    ),
    click.option("--strict", is_flag=True, help="Exit with 1 when nothing could be measured."),
)
@output_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=version,
    help="Show the version and exit.",
)
def examine(
    target: str,
    *,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    load_timeout: float,
    no_trial: bool,
    budget: float,
    device: str | None,
    trace: Path | None,
    min_speedup: float | None,
    strict: bool,
    **options: Any,
) -> int:
    """Says why FP8 training is slower than BF16 on your GPU and your model, and what to change.

    TARGET is a model file or module: model.py, model.py:build_model, pkg.module:attr; ./list for a file named
    like a command.
    """
    from fp8doctor.worker.request import TrialOrder

    if trace is not None and no_trial:
        raise click.UsageError("--trace keeps the profile of a timed step, and --no-trial times nothing.")
    folders = tuple(str(folder) for folder in options["checks"])
    kept = str(writable(trace).absolute()) if trace is not None else None
    trial = (
        None
        if no_trial
        else TrialOrder(budget, device, tuple(options["select"]), tuple(options["ignore"]), folders, kept)
    )
    gate = Gate(min_speedup, strict, traces=trace is not None)
    return examine_and_deliver(
        target, options, gate, layers=layers, batch=batch, seq=seq, load_timeout=load_timeout, trial=trial
    )


@main.command()
@output_options
def env(**options: Any) -> int:
    """Look at the environment, the packages and the GPUs only."""
    return examine_and_deliver(None, options, layers=None, batch=None, seq=None)


@main.command("report")
@click.argument("saved", type=click.Path(path_type=Path))
@output_options
def report_(saved: Path, **options: Any) -> int:
    """Replay a saved report: the checks of this version over its facts."""
    return replay_and_deliver(saved, options)


@main.command()
@output_options
def demo(**options: Any) -> int:
    """Replay a recorded patient that ships with fp8doctor."""
    return replay_and_deliver(DEMO, options)


@main.command("list")
@list_options
def list_(format: str, checks: tuple[Path, ...]) -> int:
    """Show all checks."""
    from fp8doctor import registry

    catalogue = registry.discover(checks)
    if format == "json":
        show_json([summary(check) for check in catalogue])
        return OK
    widest = [
        max(len(text) for text in column)
        for column in zip(
            *((check.code, check.severity, check.area, check.name) for check in catalogue), strict=True
        )
    ]
    for check in catalogue:
        cells = zip((check.code, check.severity, check.area, check.name), widest, strict=True)
        show_page("  ".join((*(text.ljust(width) for text, width in cells), check.title)))
    return OK


@main.command()
@click.argument("code")
@list_options
def explain(code: str, format: str, checks: tuple[Path, ...]) -> int:
    """Show the manual page of a check."""
    from fp8doctor import registry

    catalogue = registry.discover(checks)
    check = next((each for each in catalogue if code.upper() == each.code or code.lower() == each.name), None)
    if check is None:
        raise UserError(
            f"no check has the code {code!r}{alike(code, catalogue)}; 'fp8doctor list' shows them all"
        )
    if format == "json":
        show_json({**summary(check), "page": check.page})
    else:
        show_page(f"{check.code} {check.name} · {check.area} · {check.severity}\n\n{check.page}")
    return OK


def summary(check: Check) -> dict[str, Any]:
    """A check as ``list`` and ``explain`` write it in JSON."""
    return {
        "code": check.code,
        "name": check.name,
        "area": check.area,
        "severity": check.severity,
        "title": check.title,
        "needs": check.needs,
    }


def alike(code: str, catalogue: Sequence[Check]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(code.upper(), [check.code for check in catalogue])
    return f" (there is {', '.join(near)})" if near else ""


# From options to an exit code


@dataclass(frozen=True)
class Order:
    """What the options ask for, checked before any work begins."""

    format: str
    output: Path | None
    save: Path | None
    fail_on: Severity | None
    """None: never."""
    assume_gpu: str | None
    verbose: bool
    quiet: bool
    checks: dict[str, Any]
    """``select``, ``ignore`` and ``checks`` as `fp8doctor.diagnosis.diagnose` takes them."""


def order(options: dict[str, Any]) -> Order:
    """The order that options make. Raises `UserError` or a usage error for what cannot be carried out."""
    from fp8doctor import registry

    if options["verbose"] and options["quiet"]:
        raise click.UsageError("-v and -q contradict each other.")
    output, save = options["output"], options["save"]
    for path in (output, save):
        if path is not None:
            writable(path)
    suffix = output.suffix.lower() if output else ""
    if options["format"] is None and suffix not in (*FORMAT_OF_SUFFIX, *PLAIN_SUFFIXES):
        raise click.UsageError(
            f"The format of {output} is not clear from {suffix!r}; give --format "
            f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}."
        )
    chosen = {name: options[name] for name in ("select", "ignore", "checks")}
    registry.select(registry.discover(chosen["checks"]), chosen["select"], chosen["ignore"])
    return Order(
        format=options["format"] or FORMAT_OF_SUFFIX.get(suffix, "text"),
        output=output,
        save=save,
        fail_on=next((severity for severity in SEVERITIES if severity == options["fail_on"]), None),
        assume_gpu=options["assume_gpu"],
        verbose=options["verbose"],
        quiet=options["quiet"],
        checks=chosen,
    )


def writable(path: Path) -> Path:
    """The path of a file that may be written. Raises `UserError` for another."""
    if not os.access(path.parent, os.W_OK):
        raise UserError(
            f"cannot write {path}: "
            f"{'no permission in its folder' if path.parent.is_dir() else 'no such folder'}"
        )
    return path


@dataclass(frozen=True)
class Gate:
    """What a measurement has to reach or to leave, besides ``--fail-on``."""

    min_speedup: float | None = None
    strict: bool = False
    traces: bool = False

    def is_missed_by(self, report: Document) -> bool:
        """Whether a measured speedup is too small, or, with ``--strict``, nothing was measured."""
        speedup = report.verdict.speedup
        if self.strict and report.verdict.step_ms is None:
            return True
        return self.min_speedup is not None and speedup is not None and speedup < self.min_speedup


def own_step_failed(report: Document) -> str | None:
    """Why the job's own training step raised in the trial; None when it did not."""
    from fp8doctor.facts import recorded
    from fp8doctor.facts.arm_names import STEP_RAISES

    reason = report.facts.trial.reason if recorded(report.facts.trial) else None
    return reason if reason and reason.startswith(STEP_RAISES) else None


def examine_and_deliver(
    target: str | None, options: dict[str, Any], gate: Gate | None = None, **workload: Any
) -> int:
    """Examine in a worker, diagnose, deliver. An incomplete report is printed, and written nowhere."""
    wanted = order(options)

    import msgspec

    from fp8doctor.diagnosis.diagnose import diagnose
    from fp8doctor.worker.parent import examine_in_worker

    with progress(wanted.quiet) as say:
        examination = examine_in_worker(target, **workload, progress=say)
    report = diagnose(
        msgspec.structs.replace(examination.facts, assumed_gpu=wanted.assume_gpu), **wanted.checks
    )
    if examination.problem is None:
        code = deliver(report, wanted)
        if failed := own_step_failed(report):
            complain(failed)
            return FAILED
        if gate and gate.traces and not tell_of_traces(examination.traces, report, wanted):
            return FAILED
        return FOUND if gate and gate.is_missed_by(report) else code
    show_report(report, wanted)
    complain(examination.problem)
    return FAILED


def tell_of_traces(traces: dict[str, str | None], report: Document, wanted: Order) -> bool:
    """Say where the traces are; whether all that were made could be written, and there is one."""
    for file, problem in traces.items():
        if problem:
            complain(f"cannot write {file}: {problem}")
        elif not wanted.quiet:
            complain(f"a trace is in {file}")
    if not traces:
        complain(f"--trace has nothing to keep: {why_no_trace(report)}")
    return bool(traces) and not any(traces.values())


def why_no_trace(report: Document) -> str:
    from fp8doctor.facts import recorded

    trial = report.facts.trial
    if not recorded(trial):
        return "there is no GPU to time a step on; --device cpu times it on the CPU"
    gaps = trial.gaps if recorded(trial.gaps) else {}
    as_is = next((arm.reason for arm in trial.arms if arm.name == "as_is"), None)
    return gaps.get("trial.arms.breakdown") or trial.reason or as_is or "no step was profiled"


def replay_and_deliver(saved: Path, options: dict[str, Any]) -> int:
    """Replay a saved report and deliver it."""
    wanted = order(options)

    from fp8doctor.diagnosis.diagnose import replay

    return deliver(replay(saved, assume_gpu=wanted.assume_gpu, **wanted.checks), wanted)


def deliver(report: Document, wanted: Order) -> int:
    """Write the report to where it was asked for; the exit code."""
    from fp8doctor.files import write_text

    if wanted.output:
        write_text(wanted.output, rendered(report, wanted))
    else:
        show_report(report, wanted)
    if wanted.save:
        write_text(wanted.save, report.to_json())
    return FOUND if wanted.fail_on and report.reaches(wanted.fail_on) else OK


def rendered(report: Document, wanted: Order, **terminal: Any) -> str:
    """The report in the format asked for; ``terminal`` is what `fp8doctor.render.text` should know of one."""
    if wanted.format == "json":
        return report.to_json()
    if wanted.format == "markdown":
        from fp8doctor.render import markdown

        return markdown.render(report)
    from fp8doctor.render import text

    return text.render(report, verbose=wanted.verbose, quiet=wanted.quiet, **terminal)


def show_report(report: Document, wanted: Order) -> None:
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) if sys.stdout.isatty() else WIDEST
    text = rendered(report, wanted, width=width, colour=wants_colour(), ascii=wants_ascii())
    show(text.encode() if wanted.format == "json" else text)
