"""Commands with a page of their own: what was saved, a trace, and a plan before there is a run."""

from pathlib import Path
from typing import Any

import click

from fp8doctor.answer.layer_rows import layer_report, named
from fp8doctor.cli.console import FAILED, OK, complain, complain_of_printed
from fp8doctor.cli.delivery import checked_output, examine_and_deliver, examined, replay_and_deliver
from fp8doctor.cli.gate import Gate, exit_code, is_same_job
from fp8doctor.cli.options import (
    READ,
    STRICT,
    ProjectCommand,
    choice,
    count,
    delivery_options,
    fail_on,
    gate_options,
    load_timeout,
    number,
    option,
    output_options,
    report_options,
)
from fp8doctor.diagnosis.diagnose import replay
from fp8doctor.diagnosis.traces import conclude
from fp8doctor.errors import UserError
from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.gpus import gpu_specs
from fp8doctor.planning.job_options import saved_facts
from fp8doctor.planning.plan_document import plan_document
from fp8doctor.profiling.users_trace import traced_step
from fp8doctor.render.command_pages import plan_page, trace_page, why_page
from fp8doctor.report import compare as compared
from fp8doctor.report import load_health

DEMO = Path(__file__).parents[1] / "demo.json.gz"

PAGE_FORMATS = ("text", "json", "markdown", "html")

page_options = delivery_options(PAGE_FORMATS, "stdout")


@click.command(cls=ProjectCommand, params=[*output_options])
def env(**options: Any) -> int:
    """Check the environment, the packages and the GPUs, without a model."""
    return examine_and_deliver(None, options, layers=None, batch=None, seq=None)


@click.command(cls=ProjectCommand, params=[*gate_options, *output_options])
@click.argument("saved", type=READ)
def report(saved: Path, **options: Any) -> int:
    """Show a saved report again, with the checks of this version."""
    return replay_and_deliver(saved, options)


@click.command(params=[*report_options("stdout", "never")])
def demo(**options: Any) -> int:
    """Show the report of a recorded trial that ships with fp8doctor."""
    return replay_and_deliver(DEMO, options)


@click.command(
    params=[
        *page_options,
        number(
            "--min-speedup", "X", "Exit with 1 unless SECOND is measured at X times FIRST's speed.", rare=True
        ),
        STRICT,
        number("--max-regression", "PCT", "Exit with 1 if SECOND's step is slower by more than this."),
        fail_on(
            "never",
            "Exit with 1 from this severity on, if only SECOND has it: never, info, warning or error.",
        ),
    ]
)
@click.argument("first", type=READ)
@click.argument("second", type=READ)
def compare(first: Path, second: Path, **options: Any) -> int:
    """Compare two files from --save: time, tokens/s, memory, and why they differ."""
    out, gate = checked_output(options, first, second, formats=PAGE_FORMATS), Gate.of(options)
    shown = compared(first, second)
    out.deliver(lambda format: shown.to_json() if format == "json" else shown.page())
    one, other = shown.reports
    if gate != Gate() and not is_same_job(one.facts, other.facts, first.name):
        return FAILED
    return exit_code(gate.missed_by_second(shown.found, one, other))


@click.command(params=[*page_options, option("-v", "--verbose", help="Show every kernel.")])
@click.argument("file", type=READ)
def trace(file: Path, verbose: bool, **options: Any) -> int:
    """Read a torch.profiler trace: where the time goes, and whether FP8 matmuls ran.

    FILE is what export_chrome_trace or tensorboard_trace_handler wrote, .json or .json.gz. No GPU and no
    torch are needed.
    """
    out = checked_output(options, file, formats=PAGE_FORMATS)
    try:
        document = conclude(traced_step(file))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot read {file} as a trace of a GPU: {error}") from None
    page = trace_page(document, verbose=verbose)
    out.deliver(lambda format: document.to_json() if format == "json" else page)
    return OK


@click.command(params=[*page_options, option("-v", "--verbose", help="Show every layer.")])
@click.argument("file", type=READ)
def health(file: Path, verbose: bool, **options: Any) -> int:
    """Show FP8's health over a run: which layers lose precision, and since when.

    FILE is a file from 'fp8doctor run --health'. No GPU and no torch are needed.
    """
    out = checked_output(options, file, formats=PAGE_FORMATS)
    shown = load_health(file)
    out.deliver(
        lambda format: (
            shown.to_json() if format == "json" else shown.page(verbose=verbose or format == "html")
        )
    )
    return OK


@click.command(params=[*page_options])
@click.argument("layer")
@click.argument("saved", type=READ)
def why(layer: str, saved: Path, **options: Any) -> int:
    """Show everything that a saved report knows about one layer.

    LAYER is its name in the report, or a part that no other has (0.attn.q). -v of a report lists all layers.
    """
    out = checked_output(options, saved, formats=PAGE_FORMATS)
    document = replay(saved)
    found = layer_report(named(layer, document.facts), document)
    page = why_page(found, document.facts)
    out.deliver(lambda format: found.to_json() if format == "json" else page)
    return OK


def adapters(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, tuple[str, ...]] | None:
    """Read a rank and, behind a colon, the modules that get adapters."""
    if value is None:
        return None
    rank, _, modules = value.partition(":")
    if not rank.isdecimal() or not int(rank):
        raise click.BadParameter(
            f"{value} does not begin with a rank, as in 16 or 16:q_proj,v_proj", ctx, parameter
        )
    return int(rank), tuple(each.strip() for each in modules.split(",") if each.strip())


FRAMEWORKS = ("pytorch", "torchtitan", "accelerate", "trl", "axolotl", "te", "megatron")
"""Those that `fp8doctor.planning.plan_document` writes lines for, which the help does not import."""


@click.command(
    cls=ProjectCommand,
    params=[
        click.Argument(["config"]),
        option("--gpu", "gpus", takes="NAMES", default="H100", show_default=True, help="Comma-separated."),
        count("--batch", "Samples of a micro-batch on one GPU. Default: what fits."),
        count("--seq", "Tokens of a sample. Default: 4096, or what the model takes."),
        count("--dp", "GPUs that share the batch."),
        count("--tp", "GPUs of tensor parallelism, with sequence parallelism.", rare=True),
        count("--cp", "GPUs of context parallelism.", rare=True),
        count("--pp", "Stages of pipeline parallelism.", rare=True),
        count("--ep", "Ranks of --dp that divide the experts.", rare=True),
        count("--accumulate", "Micro-batches per step.", rare=True),
        choice(
            "--sharding",
            ("fsdp", "zero1", "ddp"),
            "What the GPUs of --dp share: everything (default), the optimizer, nothing.",
            rare=True,
        ),
        choice("--checkpointing", ("none", "selective", "full"), "Recompute. Default: none.", rare=True),
        choice(
            "--optimizer",
            ("adamw", "adamw-fp32", "adamw-master", "adamw-8bit", "sgd"),
            "adamw (default): states in BF16. adamw-fp32: gradients, states and master weights in fp32; "
            "adamw-master: the same with gradients in BF16.",
            rare=True,
        ),
        choice("--stack", ("torchao", "te"), "Default: both.", rare=True),
        choice(
            "--framework",
            FRAMEWORKS,
            "Show how to set FP8 up in this framework. Default: pytorch, or te.",
            rare=True,
        ),
        option(
            "--fused-loss",
            rare=True,
            help="The loss keeps no logits, as Liger Kernel's fused cross entropy.",
        ),
        option(
            "--lora",
            takes="R[:MODULES]",
            callback=adapters,
            help="LoRA of this rank, on all layers of the blocks or on those named: 16:q_proj,v_proj.",
        ),
        option("--recipe", takes="NAME", help="all (default), or one recipe such as tensorwise."),
        number(
            "--step-ms",
            "MS",
            "Your measured BF16 step on the first GPU; all times are scaled to it.",
            rare=True,
        ),
        load_timeout("building"),
        *page_options,
    ],
)
def plan(
    config: str,
    *,
    gpus: str,
    lora: tuple[int, tuple[str, ...]] | None,
    framework: str | None,
    load_timeout: float,
    format: str | None,
    output: tuple[Path, ...],
    **options: Any,
) -> int:
    """Estimate what FP8 would give, by GPU and recipe, before there is a run.

    CONFIG is a config.json, a checkpoint's folder, an architecture that transformers can build (llama), a
    model file, or a saved report, whose times are scaled. It needs no GPU and downloads nothing.
    """
    source = Path(config)
    out = checked_output({"format": format, "output": output}, source, formats=PAGE_FORMATS)
    gpu_specs(gpus)  # refuses unknown ones before a worker builds the model
    if lora is not None:
        options |= {"lora": lora[0], "lora_modules": lora[1]}
    given = {name: value for name, value in options.items() if value is not None}

    facts = saved_facts(source)
    if facts is None:
        job = {"batch": options["batch"], "seq": options["seq"], "load_timeout": load_timeout}
        found, printed = examined(config, planned=True, **job)
        if found.problem is not None:
            complain_of_printed(printed, whole=True)
            complain(found.problem)
            return FAILED
        facts = found.facts
    document = plan_document(facts, gpus, given)
    out.deliver(
        lambda format: document.to_json() if format == "json" else plan_page(document, framework=framework)
    )
    return OK
