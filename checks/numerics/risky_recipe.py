"""An FP8 setting that is known to harm training

E5M2 has two bits of mantissa, E4M3 three. E5M2 is made for the range of gradients: in the forward it rounds
twice as coarsely, and two E5M2 operands have no matmul at all. Delayed scaling takes its scale from the past.
With a history of one step, every value larger than the last step's maximum saturates.

    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")  # before

    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")       # after: the default

fp8doctor reads the dtypes and the history of the converted layers. It cannot judge gradient clipping,
learning rate and margin. Ignore it if your loss curve with this setting matches BF16's.
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
https://github.com/pytorch/pytorch/issues/132005
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor import kit

SHORTEST_HISTORY = 1
"""Steps: a history of the last step only, the default in Transformer Engine 0.x; 1.3 to 2.20 use 1024."""


@kit.check("NUM003", "risky-recipe", severity="warning", needs_fp8=True)
def risky_recipe(facts: kit.Facts) -> kit.Finding | None:
    risks = list(risks_of(facts))
    if not risks:
        return None
    names, texts, summaries, code = zip(*risks, strict=True)
    return kit.Finding(
        title=f"A setting is known to harm training: {'; '.join(names)}",
        explanation=". ".join(text[0].upper() + text[1:] for text in texts) + ".",
        evidence={"settings": names},
        treatment=kit.Treatment(name="safe-recipe", summary="; ".join(summaries), code="\n".join(code)),
    )


def risks_of(facts: kit.Facts) -> Iterator[tuple[str, str, str, str]]:
    """List each setting, what it does, and what replaces it, in words and lines."""
    saturates = "take every scale from the last step alone: every larger value saturates"
    for scaling in facts.network.scalings:
        layers = f"{kit.plural(scaling.layers, 'layer')} (first {scaling.first})"
        if any("e5m2" in dtype for dtype in scaling.forward_dtypes):
            line = "recipe.fp8_format = Format.HYBRID"
            if scaling.stack == "torchao":
                line = kit.with_recipe("tensorwise", facts)
            text = f"in {layers} input or weight is E5M2, with two bits of mantissa"
            yield "E5M2 in the forward", text, "use E4M3 in the forward", line
        history = scaling.amax_history_len
        if history is not None and history <= SHORTEST_HISTORY and scaling.amax_compute_algo != "custom":
            line = 'recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")'
            summary = "use a history of 1024 steps"
            yield f"amax history of {history}", f"{layers} {saturates}", summary, line


def _delayed(history: int) -> kit.Facts:
    scaling = kit.Scaling(
        stack="transformer_engine",
        layers=1,
        first="up",
        forward_dtypes=("float8_e4m3fn",),
        amax_history_len=history,
        amax_compute_algo="most_recent",
    )
    return kit.example(variables={}, linears=(kit.float8(stack="transformer_engine"),), scalings=(scaling,))


FIRES = _delayed(1)
SILENT = _delayed(1024)
