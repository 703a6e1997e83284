"""An FP8 setting that is known to harm training

E5M2 has two bits of mantissa, E4M3 three. E5M2 is made for the range of gradients: in the forward it rounds
twice as coarsely, and two E5M2 operands have no matmul at all. Delayed scaling takes its scale from the past.
With a history of one step, every value larger than the last step's maximum saturates. In NVFP4 training
diverges if every layer is in it: NVIDIA's recipes keep the last blocks in BF16, 15% of the layers.

    recipe = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")  # before

    from transformer_engine.common.recipe import DelayedScaling
    recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")       # after: the default

fp8doctor reads recipe, dtypes and history of the converted layers. It cannot judge gradient clipping,
learning rate and margin. Ignore it if your loss curve with this setting matches BF16's.
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
https://github.com/pytorch/pytorch/issues/132005
https://arxiv.org/abs/2509.25149
"""

from collections.abc import Iterator

from fp8doctor import kit

SHORTEST_HISTORY = 1
"""Steps: a history of the last step only, the default in Transformer Engine 0.x; 1.3 to 2.20 use 1024."""

LAST_SHARE = 0.15
"""Share of the blocks that stay in BF16 next to NVFP4, the last ones. Source: arXiv 2509.25149; 4 of 32 in
NVIDIA-NeMo/Megatron-Bridge#1347."""


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
                line = kit.conversion.with_recipe("tensorwise", facts)
            text = f"in {layers} input or weight is E5M2, with two bits of mantissa"
            yield "E5M2 in the forward", text, "use E4M3 in the forward", line
        history = scaling.amax_history_len
        if history is not None and history <= SHORTEST_HISTORY and scaling.amax_compute_algo != "custom":
            line = 'recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")'
            summary = "use a history of 1024 steps"
            yield f"amax history of {history}", f"{layers} {saturates}", summary, line
    for blocks in facts.blocks():
        count = max(1, int(LAST_SHARE * blocks.count))
        last = [each for i in range(count) for each in in_nvfp4(blocks, blocks.count - 1 - i, facts)]
        if ends := in_nvfp4(blocks, blocks.count - 1, facts):
            seen = any(each.engaged for each in ends) or not kit.stack_of(ends[0]).under_autocast
            name = f"NVFP4{'' if seen else ', perhaps'} to the last block"
            text = f"with the last of {blocks.count} blocks in NVFP4 training may diverge"
            summary = f"keep the last {kit.plural(count, 'block')} in BF16"
            yield name, text, summary, kept_in_bf16(blocks, count, last, facts)


def in_nvfp4(blocks: kit.Blocks, number: int, facts: kit.Facts) -> list[kit.Linear]:
    block = f"{blocks.name}.{number}.".lstrip(".")
    found = (each for each in facts.network.fp8 if each.recipe == "nvfp4" and each.engaged is not False)
    return [each for each in found if each.name.startswith(block)]


def kept_in_bf16(blocks: kit.Blocks, count: int, last: list[kit.Linear], facts: kit.Facts) -> str:
    if not kit.stack_of(last[0]).under_autocast:
        return kit.keep_in_bf16([each.name for each in last], facts).code
    at = kit.in_python(blocks.name, facts.network)
    each = f"list({at}.values())" if blocks.container == "ModuleDict" else at
    return f"for block in {each}[-{count}:]:\n    block.forward = te.autocast(enabled=False)(block.forward)"


def _delayed(history: int) -> kit.Facts:
    scaling = kit.facts.Scaling(
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
