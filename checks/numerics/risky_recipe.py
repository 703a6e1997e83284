"""An FP8 setting that is known to harm training

What it finds. FP8 layers cast inputs or weights to E5M2, or use an amax history of one step.

Why it matters. E5M2 has two bits of mantissa, E4M3 three. E5M2 is made for the range of gradients; in the
forward it rounds twice as coarsely, and two E5M2 operands have no matmul at all. Delayed scaling takes its
scale from the past: with a history of one step, every value larger than the last step's maximum saturates.

Fix. Use E4M3 in the forward and a long history.

    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")  # before

    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")       # after: the default

When to ignore it. If your loss curve with this setting matches BF16's.

How it is detected, and limits. fp8doctor reads the dtypes and the history of the layers, and Accelerate's
variables for both. Gradient clipping, learning rate and margin matter too, but it cannot judge them.

References. Transformer Engine refuses E5M2 ("Pure E5M2 training is not supported.").
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
https://github.com/pytorch/pytorch/issues/132005 https://arxiv.org/abs/2209.05433
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fp8doctor.analysis.fp8_request import asked_by_environment
from fp8doctor.diagnosis.treatments import with_recipe
from fp8doctor.facts import Facts, Scaling
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

HISTORY = "ACCELERATE_FP8_AMAX_HISTORY_LEN"
FORMAT = "ACCELERATE_FP8_FORMAT"

SHORTEST_HISTORY = 1
"""Steps: a history of the last step only, the default in Transformer Engine 0.x; 1.3 to 2.20 use 1024."""


class Risk(NamedTuple):
    """One risky setting, and what replaces it."""

    name: str
    text: str
    summary: str
    code: str


@check("NUM003", "risky-recipe", area="numerics", severity="warning")
def risky_recipe(facts: Facts) -> Finding | NotApplicable | None:
    wanted = any(linear.use == "training" for linear in facts.network.linears) or asked_by_environment(
        facts.environment.variables
    )
    if not wanted:
        return NotApplicable(reason="the model has no FP8 layer, and nothing asks for FP8")
    risks = [*in_the_model(facts), *by_variables(facts)]
    if not risks:
        return None
    return Finding(
        title="A setting is known to harm training: " + "; ".join(risk.name for risk in risks),
        explanation=". ".join(risk.text[0].upper() + risk.text[1:] for risk in risks) + ".",
        evidence={"settings": tuple(risk.name for risk in risks)},
        treatment=Treatment(
            name="safe-recipe",
            summary="; ".join(risk.summary for risk in risks),
            code="\n".join(risk.code for risk in risks),
        ),
    )


def in_the_model(facts: Facts) -> Iterator[Risk]:
    for scaling in facts.network.scalings:
        s, their = ("s", "its") if scaling.layers == 1 else ("", "their")
        layers = f"{plural(scaling.layers, 'layer')} ({scaling.first}{'' if s else ', ...'})"
        if any("e5m2" in dtype for dtype in scaling.forward_dtypes):
            text = f"{layers} cast{s} {their} input or weight to E5M2, with two bits of mantissa"
            code = (
                with_recipe("tensorwise", facts)
                if scaling.stack == "torchao"
                else "recipe.fp8_format = Format.HYBRID"
            )
            yield Risk("E5M2 in the forward", text, "use E4M3 in the forward", code)
        if (
            scaling.amax_history_len is not None
            and scaling.amax_history_len <= SHORTEST_HISTORY
            and scaling.amax_compute_algo != "custom"
        ):
            text = f"{layers} take{s} {their} scale from the last step alone: every larger value saturates"
            code = 'recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")'
            yield Risk(
                f"amax history of {scaling.amax_history_len}", text, "use a history of 1024 steps", code
            )


def by_variables(facts: Facts) -> Iterator[Risk]:
    """List settings that Accelerate will pass to Transformer Engine; afterwards the model has them."""
    variables = facts.environment.variables
    if variables.get("ACCELERATE_FP8_BACKEND") != "TE" or any(
        scaling.stack == "transformer_engine" for scaling in facts.network.scalings
    ):
        return
    if variables.get(HISTORY) == str(SHORTEST_HISTORY):
        text = f"{HISTORY}=1 takes every scale from the last step alone: every larger value saturates"
        yield Risk(f"{HISTORY}=1", text, "use the default history of 1024 steps", f"unset {HISTORY}")
    if variables.get(FORMAT, "").upper() == "E5M2":
        text = f"{FORMAT}=E5M2 is for gradients only, and Transformer Engine refuses it"
        yield Risk(
            f"{FORMAT}=E5M2", text, "use E4M3 in the forward, E5M2 for gradients", f"export {FORMAT}=HYBRID"
        )


def _delayed(history: int) -> Facts:
    scaling = Scaling(
        stack="transformer_engine",
        layers=1,
        first="up",
        forward_dtypes=("float8_e4m3fn",),
        amax_history_len=history,
        amax_compute_algo="most_recent",
    )
    linears = (float8(stack="transformer_engine"),)
    return example(variables={}, linears=linears, scalings=(scaling,))


FIRES = _delayed(1)
SILENT = _delayed(1024)
