"""The commands: read arguments, carry them out, exit; no torch, no user code."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fp8doctor.cli.arguments import ORDERED, first_word, options_with_value
from fp8doctor.cli.console import (
    WIDEST,
    complain,
    complain_of_known,
    complain_of_ourselves,
    or_nowhere,
    show_json,
    show_page,
    stand_in_for_closed_streams,
    stdout_failed,
)
from fp8doctor.cli.delivery import (
    FAILED,
    INTERRUPTED,
    OK,
    examine_and_deliver,
    replay_and_deliver,
)
from fp8doctor.cli.explain import explain, summary
from fp8doctor.cli.fix import fix
from fp8doctor.cli.options import (
    count,
    gate_options,
    list_options,
    number,
    output_options,
    report_options,
    seconds,
    version,
    with_options,
)
from fp8doctor.cli.pages import compare, health, why
from fp8doctor.cli.pages import trace as trace_
from fp8doctor.cli.plan import plan
from fp8doctor.cli.project import ProjectCommand, TargetCommand
from fp8doctor.cli.run import run
from fp8doctor.errors import UserError
from fp8doctor.stages import BUDGET_S

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

DEMO = Path(__file__).parents[1] / "demo.json.gz"

HELP_NAMES: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

EXAMPLES = (
    ("fp8doctor model.py", "time the step in FP8 and BF16 and say what to change"),
    ("fp8doctor run train.py --lr 1e-4", "watch a training script as it is"),
    ("fp8doctor model.py --no-trial --assume-gpu h200", "without a GPU, estimated for an H200"),
    ("fp8doctor model.py --min-speedup 1.05 -o fp8.xml", "a gate for a build server"),
    ("fp8doctor explain CMP001 SHP", "the pages of a check, and of all that begin with SHP"),
)
"""Command lines and what they are for."""

LOST_STREAM = (errno.EBADF, errno.EIO, errno.ENOSPC)
"""Errors of printing the help to a closed or full stdout."""


class Commands(click.Group):
    """The commands; without a command word the target is examined."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Let each know the names of help itself: click keeps those of whoever asks first."""
        cmd.context_settings = {**HELP_NAMES, **cmd.context_settings}
        super().add_command(cmd, name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = first_word(
            args, {name for command in self.commands.values() for name in options_with_value(command)}
        )
        if at is None or args[at] not in self.commands:
            if at is not None and not ctx.resilient_parsing:
                refuse_mistyped(args[at], self.commands)
            ordered = ["", *args]
        else:
            ordered = [args[at], *args[:at], *args[at + 1 :]]
        ctx.meta[ORDERED] = list(ordered)
        return super().parse_args(ctx, ordered)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) if cmd_name else examine

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any
    ) -> Any:
        """Run a command and exit with its code; every exception becomes a sentence."""
        stand_in_for_closed_streams()
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
            with or_nowhere():
                error.show()
            code = FAILED
        except UserError as error:
            complain(str(error), error.detail)
            complain_of_known(f"{error} {error.detail}")
            code = FAILED
        except Exception as error:
            if isinstance(error, OSError) and error.errno in LOST_STREAM:
                complain(str(stdout_failed(error)))
            else:
                complain_of_ourselves(error, verbose=bool({"-v", "--verbose"}.intersection(args)))
            code = FAILED
        sys.exit(code if args else FAILED)


def refuse_mistyped(word: str, commands: Iterable[str]) -> None:
    """Raise a usage error for a word that is nearly a command and no file or module."""
    from difflib import get_close_matches

    near = get_close_matches(word, commands, 1)
    if not near or not word.isidentifier() or Path(word).exists() or Path(f"{word}.py").exists():
        return
    from importlib.machinery import PathFinder

    if PathFinder.find_spec(word) is None:
        raise click.UsageError(f"There is no command, file or module {word!r}. Did you mean {near[0]!r}?")


def complete_target(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the first word: a command, or the file of a model."""
    from click.shell_completion import CompletionItem

    commands = [
        CompletionItem(name, help=command.get_short_help_str())
        for name, command in main.commands.items()
        if name.startswith(begun)
    ]
    return [*commands, CompletionItem(begun, type="file")]


class Examine(TargetCommand):
    """The command without a name: in usage and errors it is ``fp8doctor`` itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        context = super().make_context(
            parent.info_name if parent else info_name,
            args,
            **{"max_content_width": WIDEST, **HELP_NAMES, **extra},
        )
        context.meta.update(parent.meta if parent else {})
        return context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; if they are a script's, name the command that takes them."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            at = first_word(given, set(options_with_value(self)))
            not_ours = isinstance(error, click.NoSuchOption) or type(error) is click.UsageError
            if not not_ours or at is None or not given[at].endswith(".py"):
                raise
            raise click.UsageError(
                f"{error.format_message()}\nA training script is run with its own arguments by "
                f"'fp8doctor run {shlex.quote(given[at])} ARGS...'.",
                ctx,
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Other commands"):
            formatter.write_dl(
                [
                    (" ".join((name, *command.collect_usage_pieces(ctx)[1:])), command.get_short_help_str(80))
                    for name, command in main.commands.items()
                ]
            )
        with formatter.section("Examples"):
            formatter.write_dl(EXAMPLES)
        super().format_options(ctx, formatter)


@click.group(cls=Commands, context_settings=HELP_NAMES)
def main() -> None:
    """Explain why FP8 training is slower than BF16 on your GPU and model, and what to change."""


@click.command(
    cls=Examine,
    epilog="Exit codes: 0 no finding at or above --fail-on, 1 such a finding or a failed gate, "
    "2 no complete report.",
)
@click.argument("target", shell_complete=complete_target)
@with_options(
    count("--batch", "Batch size of the random batch."),
    count("--seq", "Sequence length of the random batch."),
    count("--layers", "Call build_model(layers=N) instead of build_model()."),
    number(
        "--load-timeout",
        "SECONDS",
        "Stop if loading the model takes longer.",
        seconds,
        default=600.0,
        show_default=True,
    ),
    click.option("--no-trial", is_flag=True, help="Do not time anything; estimate the savings."),
    number(
        "--budget",
        "SECONDS",
        f"Time budget of the whole command, which ends within 1.25 budgets. Default: {BUDGET_S:g}.",
        seconds,
    ),
    click.option(
        "--device",
        metavar="NAME",
        help="Device to time on: cuda (default), cuda:1, or cpu (CPU times say nothing about a GPU).",
    ),
)
@gate_options
@output_options
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=version,
    help="Show the version and exit.",
)
def examine(target: str, **options: Any) -> int:
    """Explain why FP8 training is slower than BF16 on your GPU and model, and what to change.

    TARGET is a model file or module: model.py, model.py:build_model, pkg.module:attr. Write ./list for a file
    that is named like a command.
    """
    from fp8doctor.worker.protocol import TrialRequest

    trial = TrialRequest(
        options["budget"],
        options["device"],
        select=tuple(options["select"]),
        ignore=tuple(options["ignore"]),
        checks=tuple(map(str, options["checks"])),
    )
    workload = {name: options[name] for name in ("layers", "batch", "seq", "load_timeout")}
    return examine_and_deliver(target, options, trial=None if options["no_trial"] else trial, **workload)


main.add_command(run)
main.add_command(fix)
main.add_command(plan)


@main.command(cls=ProjectCommand)
@output_options
def env(**options: Any) -> int:
    """Check the environment, the packages and the GPUs, without a model."""
    return examine_and_deliver(None, options, layers=None, batch=None, seq=None)


@main.command("report", cls=ProjectCommand)
@click.argument("saved", type=click.Path(path_type=Path))
@gate_options
@output_options
def report_(saved: Path, **options: Any) -> int:
    """Show a saved report again, with the checks of this version."""
    return replay_and_deliver(saved, options)


@main.command()
@report_options("stdout", "never")
def demo(**options: Any) -> int:
    """Show the report of a recorded trial that ships with fp8doctor."""
    return replay_and_deliver(DEMO, options)


main.add_command(health)
main.add_command(trace_)
main.add_command(compare)
main.add_command(why)


@main.command("list")
@list_options
def list_(format: str, checks: tuple[Path, ...]) -> int:
    """List all checks."""
    from fp8doctor.headings import headings

    catalogue = headings(checks)
    if format == "json":
        show_json([summary(check) for check in catalogue])
        return OK
    rows = [(check.code, check.severity, check.area, check.name) for check in catalogue]
    widest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, check in zip(rows, catalogue, strict=True):
        show_page("  ".join((*map(str.ljust, row, widest), check.title)))
    return OK


main.add_command(explain)
