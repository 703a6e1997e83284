"""The command ``plan``: what FP8 would give, before there is a run."""

from pathlib import Path
from typing import Any

import click

from fp8doctor.cli.console import FAILED, OK, complain, complain_of_printed
from fp8doctor.cli.delivery import checked_output, examined
from fp8doctor.cli.options import choice, count, load_timeout, number, option
from fp8doctor.cli.pages import PAGE_FORMATS, page_options
from fp8doctor.cli.project import ProjectCommand
from fp8doctor.gpus import gpu_specs
from fp8doctor.planning.job_options import saved_facts
from fp8doctor.planning.plan_document import plan_document
from fp8doctor.render.plan_page import page


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
"""Those that `fp8doctor.planning.frameworks` writes lines for, which the help does not import."""


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
        lambda format: document.to_json() if format == "json" else page(document, framework=framework)
    )
    return OK
