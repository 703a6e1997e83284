"""Fixes in the words of the framework that trains, from ``dialects.toml``."""

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
from fp8doctor.analysis.treatment_table import KEEP_IN_BF16, STAY_IN_BF16, recipe_after
from fp8doctor.diagnosis.document import Step
from fp8doctor.facts import Facts
from fp8doctor.finding import Finding, Treatment
from fp8doctor.recipes import TORCHAO, default_of, low_precision

T = TypeVar("T", Finding, Step)

TORCHTITAN = """\
from torchtitan.components.quantization import {converter}
# in model_registry(..., converters=[...]):
{converter}.Config({layers}, model_compile_enabled=True)"""
OLD_TORCHTITAN = """\
# up to v0.2.2{only}:
./run_train.sh --model.converters="quantize.linear.float8"{arguments} --compile.enable"""

FP8 = re.compile(r"\bFP8\b")

KEPT_BY_TORCHTITAN = ("rowwise", "rowwise_with_gw_hp")
"""Recipes of its Float8LinearConverter; up to v0.2.2 also tensorwise."""


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


def from_table(name: str, treatment: Treatment, facts: Facts) -> Treatment:
    """Rewrite one fix in a framework's words, if its table has any."""
    table = tables()[name]
    code = next((lines for of, lines in table["lines"].items() if fnmatch(treatment.name, of)), None)
    if code is None:
        found = re.findall(r"\b(\w+) ?= ?(\d+)\b", treatment.code)
        words = {table["arguments"][key]: value for key, value in found if key in table.get("arguments", {})}
        code = "\n".join(f"{key}: {value}" for key, value in words.items())
    if code == "{torchtitan}":
        code = _converter_of(treatment, facts)
    if not code:
        return treatment
    in_bf16 = table.get("in_bf16", {}).get(treatment.name)
    return Treatment(
        name=STAY_IN_BF16 if in_bf16 else treatment.name,
        summary=in_bf16 or treatment.summary,
        code=code.replace("{recipe}", recipe_after(treatment.name.removeprefix("convert-"))),
        layers=treatment.layers,
        kind=table.get("kind", "python"),
    )


def _converter_of(treatment: Treatment, facts: Facts) -> str:
    """Write torchtitan's converter with the recipe after a fix, without the layers that it leaves out.

    It looks for parts of names: of a layer in a block the end, if no layer with this end is converted.
    """
    linears = facts.linears()
    fp8 = [each for each in linears if each.use == "training"]
    recipe = recipe_after(treatment.name.removeprefix("convert-"))
    if treatment.name == KEEP_IN_BF16:
        recipe = (fp8[0].recipe if fp8 else None) or default_of(TORCHAO.name).name
    out = {each.name for each in linears if fp8 and each.use != "training"} | set(treatment.layers)
    if recipe == "mxfp8" and any(each.startswith("layers.") for each in out):
        return ""  # its converter takes all layers
    ends = {
        each: re.sub(r"^.*\.\d+\.", "", each) for each in sorted(out.union(each.name for each in linears))
    }
    taken = {ends[each.name] for each in linears if each.name not in out}
    named = dict.fromkeys(each if end in taken else end for each, end in ends.items() if each in out)
    return torchtitan_converter(recipe, list(named))


def torchtitan_converter(recipe: str, out: Collection[str], arguments: str = "") -> str:
    """Write the converter with this recipe that leaves out names with these parts, and its old form.

    Sources: torchtitan b5bcd76 (2026-08) and v0.2.2 (``config/job_config.py``).
    """
    if recipe == "mxfp8":
        return TORCHTITAN.format(converter="MXFP8LinearConverter", layers='fqns=["layers"]')
    named = ",".join("output" if each == "lm_head" else each for each in out)  # its name up to v0.2.2
    old = f" --quantize.linear.float8.filter_fqns={named}" if out else ""
    if recipe not in KEPT_BY_TORCHTITAN:
        return OLD_TORCHTITAN.format(only="; later ones have rowwise only", arguments=f"{old}{arguments}")
    layers = f'recipe_name="{recipe}", filter_fqns={json.dumps(list(out))}'
    old += f" --quantize.linear.float8.recipe_name={recipe}"
    new = TORCHTITAN.format(converter="Float8LinearConverter", layers=layers)
    return f"{new}\n{OLD_TORCHTITAN.format(only='', arguments=f'{old}{arguments}')}"
