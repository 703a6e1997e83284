"""The plan as one record: rows, the answer in a line, and how to set it up."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.modelled_speedup import gpu_class
from fp8doctor.analysis.significance import EVEN
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.record import Record, Unrecorded, encode, to_builtins
from fp8doctor.gpus import gpu_spec
from fp8doctor.planning.estimates import Row, measured_bf16_ms, rows
from fp8doctor.planning.frameworks import setups
from fp8doctor.planning.job_options import Options, options_for
from fp8doctor.version import VERSION

SCHEMA_VERSION = 1

MOST_TOKENS = 1 << 16
"""Tokens of a micro-batch that is assumed. A convention: with more of them the speedup hardly changes."""


class Setup(Record, frozen=True, kw_only=True):
    """The lines that train one row in one framework."""

    framework: str
    stack: str
    recipe: str
    code: str


class PlanDocument(Record, frozen=True, kw_only=True):
    """The estimates for one model."""

    schema_version: int = SCHEMA_VERSION
    tool: dict[str, str] = msgspec.field(default_factory=lambda: {"name": "fp8doctor", "version": VERSION})
    name: str
    model: str
    """Class of the model."""
    parameters: int
    options: Options
    rows: tuple[Row, ...]
    answer: str
    setups: tuple[Setup, ...] = ()
    """Of the fastest row of each stack that fits and gains, on the first GPU that has one."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return to_builtins(self)

    def to_json(self) -> str:
        return encode(self).decode()


def plan_document(facts: Facts, gpus: str | Sequence[str], given: Mapping[str, Any]) -> PlanDocument:
    """Plan the job of these facts with these `Options`. Raises `UserError` for what cannot be planned."""
    if not recorded(facts, "network.linears"):
        raise UserError(f"{facts.target.get('name', 'this')} has no model, so there is nothing to plan")
    options = options_for(facts, given)
    try:
        found = rows(facts, gpus, options)
        if assumed := assumed_batch(facts, found, given):
            options = replace(options, batch=assumed)
            found = rows(facts, gpus, options)
    except Unrecorded as error:
        why = f"an older fp8doctor wrote this report, without what a plan needs ({error})"
        raise UserError(why) from None
    if not any(each.fits or each.bf16_fits for each in found):
        least = min(found, key=lambda each: (each.bf16_memory_gib or 0.0) / each.gpu_memory_gib)
        raise UserError(
            f"a micro-batch of {options.batch:,} x {options.seq:,} tokens fits on no GPU: BF16 needs "
            f"{least.bf16_memory_gib:,.0f} GiB, and {least.gpu} has {least.gpu_memory_gib:g}. Use more GPUs "
            "(--dp or --tp), --checkpointing full, --fused-loss or a smaller --batch"
        )
    by_gpu = [list(of_gpu) for _, of_gpu in groupby(found, lambda each: each.gpu)]
    gaining = next(filter(None, (list(best_of_stacks(of_gpu)) for of_gpu in by_gpu)), [])
    return PlanDocument(
        name=facts.target.get("name", ""),
        model=facts.network.kind.rpartition(".")[2],
        parameters=facts.network.parameters,
        options=options,
        rows=found,
        answer=" ".join(answer(of_gpu, options) for of_gpu in by_gpu),
        setups=tuple(
            Setup(framework=name, stack=row.stack, recipe=row.recipe, code=code)
            for row in gaining
            for name, code in setups(facts, row, options).items()
        ),
        notes=tuple(notes(facts, found, options, assumed)),
    )


def assumed_batch(facts: Facts, found: Sequence[Row], given: Mapping[str, Any]) -> int | None:
    """Return the samples that fit in BF16, the job of today; None if the user has a batch, or a step's time.

    A recipe that needs more memory then does not fit; with its batch the others would leave the GPU idle.
    """
    timed = given.get("step_ms") or measured_bf16_ms(facts)
    if given.get("batch") or timed or facts.workload.get("batch_source") != "made up":
        return None
    options = options_for(facts, given)
    in_bf16 = [each.bf16_largest_batch for each in found if each.bf16_largest_batch]
    fitting = min(in_bf16 or [each.largest_batch for each in found if each.largest_batch], default=1)
    return max(1, min(fitting, MOST_TOKENS // options.seq))


def best_of_stacks(found: Sequence[Row]) -> Iterator[Row]:
    """Find the fastest row of each stack that fits on a GPU and gains, the fastest first."""
    gains = [each for each in found if each.fits and (each.speedup or 0.0) >= 1 + EVEN]
    gains.sort(key=lambda each: (each.is_doubtful(gains), each.step_ms or 0.0))
    fastest: dict[str, Row] = {}
    for each in gains:
        fastest.setdefault(each.stack, each)
    yield from fastest.values()


def answer(found: Sequence[Row], options: Options) -> str:
    """Say in a line what to use on one GPU, with the range, the others and the memory."""
    first = found[0]
    on = f"On {options.gpus} x {first.gpu}" if options.gpus > 1 else f"On {first.gpu}"
    timed = [each for each in found if each.speedup is not None]
    fitting = [each for each in timed if each.fits]
    needs = [each.memory_gib for each in found if each.memory_gib is not None]
    if first.bf16_fits and not timed:
        return f"{on} there is no estimate of FP8: {first.why}."
    if not fitting:
        so = "stay in BF16" if first.bf16_fits else "this job does not fit"
        in_fp8 = f", FP8 {min(needs):,.0f}" if needs else ""
        bf16 = f"BF16 needs {first.bf16_memory_gib:,.0f} GiB"
        return f"{on} {so}: {bf16}{in_fp8}, of {first.gpu_memory_gib:g}."
    best = min(fitting, key=lambda each: (each.is_doubtful(fitting), each.step_ms or 0.0))
    how = f"{best.words}, compiled"
    if best.gains_nothing:
        return f"{on} stay in BF16: the best recipe, {how}, gives {best.gives}."
    if (best.speedup_low or 0.0) <= 1:
        return f"{on} FP8 is open: the best recipe, {how}, gives {best.gives}. Time it before you decide."
    return " ".join((f"{on} use {how}: {best.gives}.", *_remarks(best, fitting)))


def _remarks(best: Row, fitting: Sequence[Row]) -> Iterator[str]:
    own = [each for each in fitting if each.stack == "torchao" != best.stack and not each.gains_nothing]
    if own:
        simpler = min(own, key=lambda each: each.step_ms or 0.0)
        told = f"torchao's {simpler.words} gives {simpler.speedup:.2f}x in yours"
        yield f"It needs a model of its own layers; {told}."
    faster = next((each for each in fitting if (each.step_ms or 0.0) < (best.step_ms or 0.0)), None)
    if faster:
        yield f"{faster.words} gives {faster.gives}: less exact, and not surely faster."
    yield f"It takes {best.memory_gib:,.1f} GiB, BF16 {best.bf16_memory_gib:,.1f}."


def notes(facts: Facts, found: Sequence[Row], options: Options, assumed: int | None) -> Iterator[str]:
    if assumed:
        yield (
            f"fp8doctor assumes --batch {assumed:,}, which fits in BF16 on each of these GPUs, "
            f"and --seq {options.seq:,}."
        )
    if unmeasured := {each.gpu for each in found if gpu_class(gpu_spec(each.gpu)) != "Hopper"}:
        named = " and ".join(sorted(unmeasured))
        yield f"fp8doctor measured nothing on {named}: those times rest on datasheets and published tables."
    if any(each.recipe == "nvfp4" and each.step_ms for each in found):
        yield "NVFP4 can harm the loss unless the last blocks stay in BF16, as NVIDIA trains with it."
    if options.lora:
        yield (
            "fp8doctor assumes BF16 for LoRA's adapters. PEFT makes them fp32 unless you pass "
            "autocast_adapter_dtype=False."
        )
        yield "FP8 training keeps the frozen base in 16 bits."
    if any(each.get("role") == "experts" for each in facts.network.linears):
        yield "fp8doctor assumes that all experts get equal shares of the tokens."
    if step_ms := options.step_ms or measured_bf16_ms(facts):
        gpu = found[0].gpu if options.step_ms else facts.trial.gpu
        yield f"All times are scaled to your BF16 step of {step_ms:,.1f} ms on {gpu}."
