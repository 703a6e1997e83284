"""The commands: their table, the help, and the one without a name; no torch, no user code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fp8doctor.cli.console import (
    FAILED,
    INTERRUPTED,
    WIDEST,
    complain,
    complain_of_known,
    stand_in_for_closed_streams,
    stdout_failed,
)
from fp8doctor.cli.options import (
    WORDS,
    ProjectCommand,
    Rare,
    count,
    gate_options,
    help_all,
    load_timeout,
    number,
    option,
    output_options,
)
from fp8doctor.errors import UserError
from fp8doctor.version import VERSION
from fp8doctor.wording import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Line(NamedTuple):
    """A command in the help: its group, the words after ``fp8doctor``, what it does, and where it is."""

    group: str
    words: str
    does: str
    place: str
    """Module of this package and name, as in an entry point."""


COMMANDS = {
    "": Line("Look", "model.py", "Time the step in FP8 and BF16, and say what to change.", ""),
    "run": Line("Look", "run train.py ARGS...", "Watch a training script as it is.", "run:run"),
    "env": Line("Look", "env", "Check packages and GPUs, without a model.", "pages:env"),
    "plan": Line(
        "Decide", "plan CONFIG", "Estimate what FP8 would give, before there is a run.", "pages:plan"
    ),
    "compare": Line("Decide", "compare SAVED SAVED", "Say why two saved reports differ.", "pages:compare"),
    "report": Line("Decide", "report SAVED", "Show a saved report again.", "pages:report"),
    "why": Line("Decide", "why LAYER SAVED", "Show all that a report knows of a layer.", "pages:why"),
    "explain": Line(
        "Learn", "explain CODE|ERROR", "Explain a check ('list' names them) or an error.", "explain:explain"
    ),
    "list": Line("", "list", "List all checks.", "explain:list_"),
    "demo": Line("Learn", "demo", "Show the report of a recorded trial.", "pages:demo"),
    "health": Line("Learn", "health FILE", "Show FP8's health over a long run.", "pages:health"),
    "trace": Line("Learn", "trace FILE", "Say where a torch.profiler trace's time goes.", "pages:trace"),
    "fix": Line("Learn", "fix SCRIPT", "Show a report's plan as a diff of a script.", "fix:fix"),
}
"""Commands by name; the help shows those with a group. The one without a name examines its target."""

LOST_STREAM = (errno.EBADF, errno.EIO, errno.ENOSPC)
"""Errors of printing the help to a closed or full stdout."""


class Commands(click.Group):
    """The commands, each imported when it is used; without a command word the target is examined."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self.first_word(args)
        if at is None or args[at] not in COMMANDS:
            if at is not None and not ctx.resilient_parsing:
                refuse_mistyped(args[at], COMMANDS)
            ordered = ["", *args]
        else:
            ordered = [args[at], *args[:at], *args[at + 1 :]]
        ctx.meta[WORDS] = list(ordered)
        return super().parse_args(ctx, ordered)

    def first_word(self, args: list[str]) -> int | None:
        """Find the first word that is no option and no option's value; none behind ``--``."""
        words = [at for at, arg in enumerate(args) if not arg.startswith("-")]
        if not words or not words[0]:
            return words[0] if words else None
        options = [each for command in self.every().values() for each in command.params]
        valued = {name for each in options if not getattr(each, "is_flag", True) for name in each.opts}
        is_value = False
        for at, arg in enumerate(args):
            if is_value:
                is_value = False
            elif arg == "--":
                return None
            elif not arg.startswith("-") or arg == "-":
                return at
            else:
                letters = [arg] if arg.startswith("--") else [f"-{letter}" for letter in arg[1:]]
                is_value = letters[-1] in valued and valued.isdisjoint(letters[:-1])
        return None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            from importlib import import_module

            module, _, name = COMMANDS[cmd_name].place.partition(":")
            command = getattr(import_module(f"fp8doctor.cli.{module}"), name) if module else examine
            if Rare in [type(each) for each in command.params]:  # a generator would swallow an interrupt
                help_all(command)
            self.commands[cmd_name] = command
        return self.commands.get(cmd_name)

    def every(self) -> dict[str, click.Command]:
        context = click.Context(self)
        return {name: command for name in COMMANDS if (command := self.get_command(context, name))}

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
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "fp8doctor"
            complain(f"{error.format_message().rstrip('.')}. See '{command} --help'.".replace("?. ", "? "))
            code = FAILED
        except UserError as error:
            complain(str(error), error.detail)
            complain_of_known(f"{error} {error.detail}")
            code = FAILED
        except Exception as error:
            if isinstance(error, OSError) and error.errno in LOST_STREAM:
                complain(str(stdout_failed(error)))
            else:
                from traceback import format_exception

                complain(
                    f"internal error, {type(error).__name__}: {error}. This is a bug in fp8doctor, not in "
                    "your job. Please report it with the output of the same command with -v.",
                    "".join(format_exception(error)) if {"-v", "--verbose"}.intersection(args) else "",
                )
            code = FAILED
        sys.exit(code if args else FAILED)


def refuse_mistyped(word: str, commands: Iterable[str]) -> None:
    """Raise a usage error for a word that is nearly a command and no file or module."""
    meant = did_you_mean(word, commands)
    if not meant or not word.isidentifier() or os.path.exists(word) or os.path.exists(f"{word}.py"):
        return
    from importlib.machinery import PathFinder

    if PathFinder.find_spec(word) is None:
        raise click.UsageError(f"There is no command, file or module {word!r}{meant}")


def complete_target(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the first word: a command, or the file of a model."""
    from click.shell_completion import CompletionItem

    commands = [
        CompletionItem(name, help=line.does)
        for name, line in COMMANDS.items()
        if name and name.startswith(begun)
    ]
    return [*commands, CompletionItem(begun, type="file")]


class Examine(ProjectCommand):
    """The command without a name: in usage and errors it is ``fp8doctor`` itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if parent:
            info_name = parent.info_name
            extra = {"max_content_width": WIDEST, "help_option_names": parent.help_option_names, **extra}
        context = super().make_context(info_name, args, **extra)
        context.meta.update(parent.meta if parent else {})
        return context

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; if they are a script's, name the command that takes them."""
        script = next((each for each in args if each.endswith(".py")), "")
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            not_ours = isinstance(error, click.NoSuchOption) or type(error) is click.UsageError
            if not (not_ours and script):
                raise
            from shlex import quote

            raise click.UsageError(
                f"{error.format_message()} A training script is run with its own arguments by "
                f"'fp8doctor run {quote(script)} ARGS...'.",
                ctx,
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(len(line.words) for line in COMMANDS.values())
        for group in ("Look", "Decide", "Learn"):
            with formatter.section(group):
                lines = [line for line in COMMANDS.values() if line.group == group]
                formatter.write_dl([(line.words.ljust(widest), line.does) for line in lines])
        super().format_options(ctx, formatter)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Explain why FP8 training is slower than BF16 on your GPU and model, and what to change."""


@click.command(
    cls=Examine,
    epilog="Exit codes: 0 no finding at or above --fail-on, 1 such a finding or a failed gate, "
    "2 no complete report.",
    params=[
        click.Argument(["target"], shell_complete=complete_target),
        count("--batch", "Batch size of the random batch."),
        count("--seq", "Sequence length of the random batch."),
        count("--layers", "Call build_model(layers=N) instead of build_model().", rare=True),
        load_timeout("loading"),
        option("--no-trial", help="Do not time anything; estimate the savings."),
        number("--budget", "SECONDS", "Time budget of the whole command. Default: 90."),
        option(
            "--device",
            takes="NAME",
            rare=True,
            help="Device to time on: cuda (default), cuda:1, or cpu (CPU times say nothing about a GPU).",
        ),
        *gate_options,
        *output_options,
    ],
)
@click.version_option(VERSION, prog_name="fp8doctor", message="%(prog)s %(version)s")
def examine(target: str, **options: Any) -> int:
    """Explain why FP8 training is slower than BF16 on your GPU and model, and what to change.

    TARGET is model.py, model.py:build_model or pkg.module:attr.
    """
    from fp8doctor.cli.delivery import examine_and_deliver
    from fp8doctor.worker import TrialRequest

    trial = TrialRequest(
        options["budget"],
        options["device"],
        select=tuple(options["select"]),
        ignore=tuple(options["ignore"]),
        checks=tuple(map(str, options["checks"])),
    )
    workload = {name: options[name] for name in ("layers", "batch", "seq", "load_timeout")}
    return examine_and_deliver(target, options, trial=None if options["no_trial"] else trial, **workload)
