"""Fixes in the words of the framework that trains, from ``dialects.toml``."""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Collection
from fnmatch import fnmatch
from importlib import resources
from typing import Any, TypeVar

from msgspec.structs import replace

from fp8doctor.analysis.fp8_request import trains_in_16_bits, under_unsloth
from fp8doctor.analysis.treatment_table import STAY_IN_BF16, recipe_after
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Treatment
from fp8doctor.recipes import low_precision

T = TypeVar("T", Finding, Step)

FP8 = re.compile(r"\bFP8\b")


def in_dialect(told: tuple[T, ...], facts: Facts) -> tuple[T, ...]:
    """Rewrite the fixes for the framework that trains, and name the format that the job trains in."""
    low = low_precision(facts.linears())
    if low != "FP8":
        told = tuple(_in_format(each, low) for each in told)
    name = _framework(facts)
    if not name:
        return told
    return tuple(
        replace(each, treatment=from_table(name, each.treatment, facts)) if each.treatment else each
        for each in told
    )


def _in_format(told: T, low: str) -> T:
    """Call what a finding or a fix is about by its format."""
    treatment = told.treatment
    if treatment:
        summary, code = (FP8.sub(low, text) for text in (treatment.summary, treatment.code))
        treatment = replace(treatment, summary=summary, code=code)
    return replace(told, title=FP8.sub(low, told.title), treatment=treatment)


@functools.cache
def tables() -> dict[str, dict[str, Any]]:
    """Read the table of each framework."""
    return tomllib.loads(resources.files("fp8doctor").joinpath("dialects.toml").read_text("utf-8"))


def _framework(facts: Facts) -> str:
    """Name the table of the framework that trains; empty if it has none."""
    if (facts.get("network.kind", "") or "").startswith("torchtitan."):
        return "torchtitan"
    axolotl = facts.packages().get("axolotl")
    if axolotl and axolotl.get("imported"):
        return "axolotl"
    if not under_unsloth(facts):
        return ""
    return "unsloth-lora" if trains_in_16_bits(facts) else "unsloth"


def lines_of(name: str, treatment: str) -> str | None:
    """Look up a framework's lines for a treatment, by its name."""
    lines = next((each for of, each in tables()[name]["lines"].items() if fnmatch(treatment, of)), None)
    return lines and lines.replace("{recipe}", recipe_after(treatment.removeprefix("convert-")))


def from_table(name: str, treatment: Treatment, facts: Facts) -> Treatment:
    """Rewrite one fix in a framework's words, if its table has any."""
    table, code = tables()[name], lines_of(name, treatment.name)
    if code is None:
        found = re.findall(r"\b(\w+) ?= ?(\d+)\b", treatment.code)
        words = {table["arguments"][key]: value for key, value in found if key in table.get("arguments", {})}
        code = "\n".join(f"{key}: {value}" for key, value in words.items())
    if not code:
        return treatment
    in_bf16 = table.get("in_bf16", {}).get(treatment.name)
    return Treatment(
        name=STAY_IN_BF16 if in_bf16 else treatment.name,
        summary=in_bf16 or treatment.summary,
        code=code.replace("{out}", json.dumps(_parts(treatment.layers, facts))),
        layers=treatment.layers,
        kind=table.get("kind", "python"),
    )


def _parts(names: Collection[str], facts: Facts) -> list[str]:
    """Name layers by parts of names: of a layer in a block the end, if no other FP8 layer has this end."""
    ends = {each.name: re.sub(r"^.*\.\d+\.", "", each.name) for each in facts.linears()}
    stay = {ends[each.name] for each in facts.linears() if each.name not in names and each.use == "training"}
    return list(dict.fromkeys(each if ends[each] in stay else ends[each] for each in names))
