"""The command ``run``: a training script, watched, and its report."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from fp8doctor.answer.open_questions import launcher
from fp8doctor.cli.console import FAILED, OK, complain, complain_of_known
from fp8doctor.cli.delivery import checked_options, deliver, deliver_early, keep_apart
from fp8doctor.cli.options import FILE, ProjectCommand, count, gate_options, number, option, report_options
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.document import Document
from fp8doctor.errors import UserError, has_torch, torch_line
from fp8doctor.facts import Facts, Ranks, recorded
from fp8doctor.facts.scrub import scrub
from fp8doctor.files import digest
from fp8doctor.running.launch import checked_script, run_script
from fp8doctor.running.rank_reports import RankReports, rank_place
from fp8doctor.running.script_messages import ScriptState, WatchOptions
from fp8doctor.stages import BUDGET_S, STEPS, WARMUP
from fp8doctor.wording import plural

IN_PLACE = (
    "a job of {} processes is timed in its own steps, in place; with --stop, rank 0 also times copies of its "
    "model"
)
"""Why no copy is timed."""

NO_STEP = (
    "no optimizer of torch took a step in the script's process. What it starts in processes of their own "
    "(launchers, fork, spawn), optimizers of other libraries and a compiled optimizer.step are not seen; put "
    "'fp8doctor run' in front of the command that trains"
)
"""Why no step of a whole script was seen."""

UNTIMED = (
    "no copies of the model were timed: a variant that fails could take the training's GPU context with it. "
    "To time them after the watched steps, which ends the script"
)
"""Stands before the command that times them."""


def with_m(ctx: click.Context, parameter: click.Parameter, script: tuple[str, ...]) -> tuple[str, ...]:
    return ("-m", *script) if ctx.params["module"] else script


@click.command(
    cls=ProjectCommand,
    context_settings={"allow_interspersed_args": False},  # from the script on, all is the script's
    epilog="Exit code: the script's own. With --fail-on or another gate it is 1 when the script succeeded "
    "and the gate is missed. It is 2 when nothing could be examined.",
    params=[
        click.Argument(["script"], nargs=-1, metavar="train.py|-m MODULE [ARGS]...", callback=with_m),
        click.Option(["-m", "module"], is_flag=True, hidden=True, is_eager=True),
        count("--steps", "Number of steps to time.", 3, default=STEPS, show_default=True),
        count(
            "--warmup",
            "Minimum number of warm-up steps; more while the steps still compile.",
            rare=True,
            default=WARMUP,
            show_default=True,
        ),
        option("--stop", help="After the timed steps, stop the script and time copies of the model."),
        number("--budget", "SECONDS", "Time budget of the trial.", default=BUDGET_S, show_default=True),
        option("--no-trial", rare=True, help="Time no copies of the model, even with --stop."),
        option(
            "--device", takes="NAME", rare=True, help="Device to time on: cuda (default), cuda:1, or cpu."
        ),
        option(
            "--health",
            takes="FILE",
            type=FILE,
            help="Sample FP8's health to the script's end; append it to a file for 'fp8doctor health FILE'.",
        ),
        count(
            "--every",
            "Steps between two samples of --health. Default: 100, more if samples take over 1% of the time.",
            rare=True,
        ),
        option(
            "--stop-on-nan",
            rare=True,
            help="Stop the script (exit code 1) at the first loss or gradient that is not finite.",
        ),
        *gate_options,
        *report_options("stderr", "never"),
    ],
)
def run(*, script: tuple[str, ...], module: bool, **options: Any) -> int:
    """Run a training script unchanged, time some of its steps, and report on stderr.

    \b
    fp8doctor run train.py --lr 1e-4          like python train.py --lr 1e-4
    fp8doctor run --stop -m pkg.train         like python -m pkg.train; stops after the timed steps
    """
    watched = checked_script(script)
    place = rank_place(os.environ)
    reports = place is None or place.rank == 0
    wanted = checked_options(options, watched.file, code=watched.file)
    path = checked_health(options, watched.file)
    gated = reports and wanted.gate.asks
    stop, copies = options["stop"], not options["no_trial"]
    settings = WatchOptions(
        script=watched.name,
        module=watched.is_module,
        budget_s=options["budget"] if reports and stop and copies else None,
        select=tuple(options["select"]),
        ignore=tuple(options["ignore"]),
        checks=tuple(str(Path(folder).absolute()) for folder in options["checks"]),
        health=path if reports else None,
        rank=None if place is None else place.rank,
        **{name: options[name] for name in ("steps", "warmup", "stop", "device", "every", "stop_on_nan")},
    )
    started = digest(watched.file.read_bytes()) if watched.file and watched.file.is_file() else None

    def diagnosed(seen: ScriptState, facts: Facts) -> Document:
        changed: dict[str, Any] = {"assumed_gpu": wanted.assume_gpu}
        if place is not None:
            facts = of_many(facts, place.world_size, seen.ranks)
        if started and recorded(facts, "target"):
            changed["target"] = replace(facts.target, digest=started)
        if failed_early(seen):
            changed["script_error"] = scrub(seen.error or "")
        return diagnose(replace(facts, **changed), **wanted.checks)

    def early(seen: ScriptState, after_steps: int) -> None:
        if not reports or seen.facts is None:
            return
        try:
            deliver_early(diagnosed(seen, seen.facts), wanted, after_steps)
        except UserError as error:
            complain(f"{error}; fp8doctor tries again when the script ends")
        except Exception:  # the report at the end says it
            import logging

            logging.getLogger("fp8doctor").debug("no report while the script runs", exc_info=True)

    def report(seen: ScriptState) -> int:
        if not reports:
            return OK
        for sentence in what_was_not_seen(seen, settings.warmup + settings.steps):
            complain(sentence)
        if seen.error is not None and not failed_early(seen):
            complain_of_known(seen.error)
        if seen.facts is None:
            return FAILED if gated else OK
        timed = recorded(seen.facts, "trial") or seen.facts.get("observed.clock") != "cuda"
        if wanted.again and copies and not (stop or wanted.quiet or timed) and seen.ranks is None:
            complain(f"{UNTIMED}: {launcher(seen.facts)}{' '.join(wanted.again).strip()}")
        told = diagnosed(seen, seen.facts)
        deliver(told, wanted)
        return wanted.gate.judged(told)

    say = complain if reports and not wanted.quiet else lambda text: None
    others = None if place is None else RankReports(place)
    return run_script(watched, settings, gated=gated, say=say, early=early, report=report, others=others)


def checked_health(options: dict[str, Any], script: Path | None) -> str | None:
    """Return the absolute path for FP8's health. Raises `UserError` or a usage error."""
    health = options["health"]
    if health is None:
        if options["every"] is not None:
            raise click.UsageError("--every is the distance of the samples of --health. Name a file with it.")
        return None
    if options["stop"]:
        raise click.UsageError("--stop ends the script, and --health samples it to its end. Leave one out.")
    keep_apart([("--health", health)], script)
    return str(health.absolute())


def of_many(facts: Facts, processes: int, ranks: Ranks | None) -> Facts:
    """Add the other processes to the facts of rank 0, and why no copy of it was timed."""
    if ranks is not None:
        facts = replace(facts, ranks=ranks)
    if recorded(facts, "trial"):
        return facts
    gaps = {**facts.get("gaps", {}), "trial": IN_PLACE.format(processes)}
    return replace(facts, gaps=gaps)


def failed_early(seen: ScriptState) -> bool:
    """Return whether the script failed before its first step. The report starts with that."""
    return seen.error is not None and seen.facts is not None and not seen.stepped


def what_was_not_seen(seen: ScriptState, needed: int) -> Iterator[str]:
    """Say what of a script was not seen, and why; only its notes if its window was complete."""
    yield from seen.notes
    if seen.complete or failed_early(seen):
        return
    end = " Its process ended without Python's own end: os._exit, exec, a signal or a crash."
    end = "" if seen.ended else end
    if not seen.torch and seen.error is not None:
        type_it = "" if has_torch() else f"; install fp8doctor where you train, or type: {torch_line()}"
        yield f"the script failed before it imported torch: {seen.error}{type_it}"
        return
    after = f"after {plural(seen.steps, 'step')}, " if seen.steps is not None else ""
    no_torch = "" if seen.notes else "nothing was seen: the script's process imported no torch"
    told = {
        no_torch: not seen.torch,
        f"the script ended {after}before {needed} steps were watched: the report is of what was seen until "
        "then": seen.stepped,
        f"no training step was seen: the script failed before its first, {seen.error}": seen.error,
        f"no training step was seen: {NO_STEP}": True,
    }
    if why := next(why for why, holds in told.items() if holds):
        yield f"{why}.{end}"
