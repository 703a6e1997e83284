"""The plan as one record: rows, the answer in a line, and how to set it up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.facts.record import Record, encode, to_builtins
from fp8doctor.planning.options import Options
from fp8doctor.planning.rows import Row, rows
from fp8doctor.version import VERSION

SCHEMA_VERSION = 1

EVEN = 0.03
"""Share by which a speedup has to differ from 1, as in the verdict."""

LEAST_GIB = 0.5
"""GiB below which memory counts as unchanged."""

STACK_WORDS = {"torchao": "torchao", "te": "Transformer Engine"}


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
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return to_builtins(self)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return encode(self).decode()


def plan_document(facts: Facts, gpus: Sequence[str], options: Options) -> PlanDocument:
    """Plan the job of these facts. Raises `UserError` for what cannot be planned."""
    found = rows(facts, gpus, options)
    if not any(each.fits or each.bf16_fits for each in found):
        least = min(found, key=lambda each: each.bf16_memory_gib or 0.0)
        raise UserError(
            f"a micro-batch of {options.batch} x {options.seq:,} tokens fits no GPU: BF16 needs "
            f"{least.bf16_memory_gib:,.0f} GiB, and {least.gpu} has {least.gpu_memory_gib:g}. Use more GPUs "
            "(--dp or --tp), --checkpointing full or a smaller --batch"
        )
    return PlanDocument(
        name=facts.target.get("name", ""),
        model=facts.network.kind.rpartition(".")[2],
        parameters=facts.network.parameters,
        options=options,
        rows=found,
        answer=" ".join(answer([row for row in found if row.gpu == gpu], options) for gpu in _names(found)),
        notes=tuple(notes(facts, found, options)),
    )


def _names(found: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(each.gpu for each in found))


def answer(found: Sequence[Row], options: Options) -> str:
    """Say in a line what to use on one GPU, with the range, the others and the memory."""
    gpu = found[0].gpu
    on = f"On {options.gpus} x {gpu}" if options.gpus > 1 else f"On {gpu}"
    fitting = [each for each in found if each.fits and each.speedup is not None]
    if not fitting:
        why = next((each.why for each in found if each.why), "")
        if any(each.fits is False for each in found):
            need = min(each.memory_gib for each in found if each.memory_gib is not None)
            why = f"FP8 needs {need:,.0f} GiB of its {found[0].gpu_memory_gib:g}"
        return f"{on} stay in BF16: {why}."
    best = max(fitting, key=lambda each: each.speedup or 0.0)
    told = f"{best.speedup:.2f}x ({best.speedup_low:.2f} to {best.speedup_high:.2f})"
    how = f"{words(best)}{', compiled' if best.compiled else ''}"
    if (best.speedup or 0.0) < 1 + EVEN:
        return f"{on} stay in BF16: FP8 gains nothing, at best {told} with {how}."
    said = [f"{on} use {how}: {told}."]
    if (best.speedup_low or 0.0) <= 1:
        said.append("Time it before you rely on it: the range includes no gain.")
    said += _others(best, fitting)
    saved = (best.bf16_memory_gib or 0.0) - (best.memory_gib or 0.0)
    what = "no memory" if abs(saved) < LEAST_GIB else f"{saved:.1f} GiB"
    said.append(f"FP8 takes {-saved:.1f} GiB more." if saved <= -LEAST_GIB else f"FP8 saves {what} here.")
    return " ".join(said)


def _others(best: Row, fitting: Sequence[Row]) -> list[str]:
    """Say which other compiled recipes of the same stack gain nothing."""
    none = [
        each.recipe
        for each in fitting
        if each.compiled == best.compiled
        and each.stack == best.stack
        and each.recipe != best.recipe
        and (each.speedup or 0.0) < 1 + EVEN
    ]
    named = " and ".join((", ".join(none[:-1]), none[-1])) if len(none) > 1 else "".join(none)
    return [f"{named[:1].upper()}{named[1:]} {'gain' if len(none) > 1 else 'gains'} nothing."] if none else []


def words(row: Row) -> str:
    """Name a row's recipe with its stack."""
    return row.recipe if row.stack == "torchao" else f"{STACK_WORDS[row.stack]} {row.recipe}"


def notes(facts: Facts, found: Sequence[Row], options: Options) -> list[str]:
    """Say what the estimates assume."""
    said = []
    if options.lora:
        said.append(
            "LoRA's adapters are taken to be in BF16; PEFT makes them fp32 unless you pass "
            "autocast_adapter_dtype=False."
        )
    if any(each.get("role") == "experts" for each in facts.network.linears):
        said.append("Experts are taken to get equal shares of the tokens.")
    return said
