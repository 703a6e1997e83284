"""Fixes in torchtitan's words: it quantizes the model's configuration, so no line may convert the model.

Sources: torchtitan b5bcd76 (2026-08) and v0.2.2 (``config/job_config.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from fp8doctor.analysis.treatment_table import (
    CHECKPOINTING_OFF,
    COMPILE_BLOCKS,
    COMPILE_LAYERS,
    COMPILE_MODEL,
    KEEP_IN_BF16,
    STAY_IN_BF16,
    recipe_after,
    traits,
)
from fp8doctor.facts import Facts, Linear, if_recorded
from fp8doctor.finding import Treatment
from fp8doctor.recipes import TORCHAO, default_of

CONVERTER = """\
from torchtitan.components.quantization import {converter}
# in model_registry(..., converters=[...]):
{converter}.Config({layers}, model_compile_enabled=True)"""
OLD = """\
# up to v0.2.2{only}:
./run_train.sh --model.converters="quantize.linear.float8"{arguments} --compile.enable"""

KEPT = ("rowwise", "rowwise_with_gw_hp")
"""Recipes of its Float8LinearConverter; up to v0.2.2 also tensorwise."""

LINES = {
    **dict.fromkeys(
        (COMPILE_BLOCKS, COMPILE_MODEL, COMPILE_LAYERS),
        './run_train.sh --compile.enable   # and components=["model", ...] in CompileConfig\n'
        "# with model_compile_enabled=True in the converter's Config",
    ),
    CHECKPOINTING_OFF: "# activation_checkpoint=None in Trainer.Config;\n"
    "# up to v0.2.2: --activation_checkpoint.mode none",
    STAY_IN_BF16: "# leave the converters out of model_registry(..., converters=[...])\n"
    "./run_train.sh --compile.enable",
}
"""Treatment -> its lines."""


def written(treatment: Treatment, facts: Facts) -> Treatment:
    """Rewrite one fix, if torchtitan has words of its own for it."""
    name, linears = treatment.name, if_recorded(lambda known: known.network.linears, facts) or ()
    code = LINES.get(name)
    if name == KEEP_IN_BF16 or traits(name).family == "convert" or name.startswith("recipe-"):
        fp8 = [each for each in linears if each.use == "training"]
        now = fp8[0].recipe if fp8 else default_of(TORCHAO.name).name
        recipe = now if name == KEEP_IN_BF16 else recipe_after(name.removeprefix("convert-"))
        out = {each.name for each in linears if fp8 and each.use != "training"} | set(treatment.layers)
        if recipe == "mxfp8" and any(each.startswith("layers.") for each in out):  # it converts all of them
            return treatment
        code = converter(recipe or "rowwise", short(out, linears))
    if code is None:
        return treatment
    return Treatment(name=name, summary=treatment.summary, code=code, layers=treatment.layers)


def converter(recipe: str, out: Collection[str], arguments: str = "") -> str:
    """Write the converter with this recipe that leaves out names with these parts, and its old form."""
    if recipe == "mxfp8":
        return CONVERTER.format(converter="MXFP8LinearConverter", layers='fqns=["layers"]')
    named = ",".join("output" if each == "lm_head" else each for each in out)  # its name up to v0.2.2
    old = f" --quantize.linear.float8.filter_fqns={named}" if out else ""
    if recipe not in KEPT:
        return OLD.format(only="; later ones have rowwise only", arguments=f"{old}{arguments}")
    layers = f'recipe_name="{recipe}", filter_fqns={json.dumps(list(out))}'
    old += f" --quantize.linear.float8.recipe_name={recipe}"
    new = CONVERTER.format(converter="Float8LinearConverter", layers=layers)
    return f"{new}\n{OLD.format(only='', arguments=f'{old}{arguments}')}"


def short(out: Collection[str], linears: Collection[Linear]) -> list[str]:
    """Name layers by the parts that torchtitan looks for: their end, if all layers with it are meant."""

    def end(name: str) -> str:
        return re.sub(r"^.*\.\d+\.", "", name)

    others = {end(each.name) for each in linears if each.name not in out}
    return list(dict.fromkeys(name if end(name) in others else end(name) for name in sorted(out)))
