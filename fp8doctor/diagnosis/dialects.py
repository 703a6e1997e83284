"""Fixes in the words of the framework that trains: torchtitan, or a table of ``dialects.toml``."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import resources
from typing import Any, TypeVar

import msgspec

from fp8doctor.analysis.fp8_request import trains_in_16_bits, under_unsloth
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, recipe_after
from fp8doctor.diagnosis import torchtitan
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Treatment

T = TypeVar("T", Finding, Step)


def in_dialect(told: tuple[T, ...], facts: Facts) -> tuple[T, ...]:
    """Rewrite the fixes for the framework that trains; without one they stay as they are."""
    write = _writer(facts)
    if write is None:
        return told
    return tuple(
        msgspec.structs.replace(each, treatment=write(each.treatment)) if each.treatment else each
        for each in told
    )


@functools.cache
def tables() -> dict[str, dict[str, Any]]:
    """Read the table of each framework."""
    return tomllib.loads(resources.files("fp8doctor").joinpath("dialects.toml").read_text("utf-8"))


def _writer(facts: Facts) -> Callable[[Treatment], Treatment] | None:
    """Find who writes the fixes of this job."""
    if (facts.get("network.kind", "") or "").startswith("torchtitan."):
        return lambda treatment: torchtitan.written(treatment, facts)
    axolotl = facts.packages().get("axolotl")
    name = "axolotl" if axolotl and axolotl.get("imported") else "unsloth" if under_unsloth(facts) else None
    if name == "unsloth" and trains_in_16_bits(facts):
        name = "unsloth-lora"
    return functools.partial(from_table, name) if name else None


def from_table(name: str, treatment: Treatment) -> Treatment:
    """Rewrite one fix in a framework's words, if its table has any."""
    table = tables()[name]
    code = next((lines for of, lines in table["lines"].items() if fnmatch(treatment.name, of)), None)
    if code is None:
        found = re.findall(r"\b(\w+) ?= ?(\d+)\b", treatment.code)
        words = {table["arguments"][key]: value for key, value in found if key in table.get("arguments", {})}
        code = "\n".join(f"{key}: {value}" for key, value in words.items())
    if not code:
        return treatment
    code = code.replace("{recipe}", recipe_after(treatment.name.removeprefix("convert-")))
    in_bf16 = table.get("in_bf16", {}).get(treatment.name)
    return Treatment(
        name=STAY_IN_BF16 if in_bf16 else treatment.name,
        summary=in_bf16 or treatment.summary,
        code=code,
        layers=treatment.layers,
        kind=table.get("kind", "python"),
    )
