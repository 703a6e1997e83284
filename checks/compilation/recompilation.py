"""Code is compiled again and again

Dynamo keeps at most 8 versions of a function, and each costs seconds to compile. The ninth is not compiled:
the function runs without compilation from then on, with one warning in the log. Such an FP8 block is several
times slower. A KV cache makes every block a version of its own, because the code checks which layer of the
cache it writes. Of 12 Llama blocks, 8 were compiled and 4 were not. Without the cache one version serves all
12. Nobody reads that cache in training.

    for block in model.model.layers:      # before: one version per block
        block.compile()

    model.config.use_cache = False        # after: one for all
    for block in model.model.layers:
        block.compile()

Checkpointing switches the cache off too. Pad batches to a few lengths. If you need many versions, raise the
limit: `torch._dynamo.config.recompile_limit = 64` (torch 2.7 or newer). Ignore it if the versions stay below
the limit: this is only information. A model compiled as a whole has one version either way. Without a trial,
only the KV cache is seen.
https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
https://github.com/huggingface/transformers/blob/main/src/transformers/cache_utils.py
"""

import re

from fp8doctor import kit

RECOMPILE_LIMIT = 8
"""Versions of one function that Dynamo keeps by default. Source: ``recompile_limit`` in
``torch/_dynamo/config.py``, torch 2.7 to 2.13; ``cache_size_limit``, equally 8, in 2.6."""

SHAPES = re.compile(r"size mismatch|stride mismatch|\.(size|stride)\(|shape", re.IGNORECASE)
"""Guards on a shape: ``tensor 'x' size mismatch at index 0. ...`` Source: torch/csrc/dynamo/guards.cpp."""

PAD = kit.Treatment(
    name="pad-to-few-lengths",
    summary="pad batches to a few lengths, or compile with dynamic=True",
    code="collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=256)   # a few lengths",
)


@kit.check("CMP005", "recompilation", severity="warning", **kit.BROKEN_IN_BF16_TOO)
def recompilation(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    training = facts.training
    if not training.compile_marks:
        return kit.NotApplicable(reason="nothing asks for torch.compile")
    timed = next((arm for arm in facts.arms() if arm.name == kit.ArmName.AS_IS), None)
    cut = timed.cuts[-1] if timed and timed.get("cuts") else None
    left_eager, reasons = (cut.get("left_eager"), cut.get("recompile_reasons", ())) if cut else ((), ())
    versions = cached_blocks(facts) if training.use_cache else 0
    limit = facts.get("training.dynamo.recompile_limit") or RECOMPILE_LIMIT
    if cut and left_eager == () and (sum(cut.blocks.values()) or versions) > limit:
        versions = 0  # more blocks ran than the limit, and none was left: the step switches the cache off
    if versions > limit:
        title = f"A KV cache leaves {versions - limit} of {versions} blocks uncompiled in training"
    elif versions > 1:
        title = f"A KV cache makes {versions} blocks compile {versions} times instead of once"
    elif left_eager:
        title = f"{left_eager[0]} reached the recompile limit and is no longer compiled"
    else:
        return None if timed else kit.NotApplicable(reason="only a trial shows if frames are compiled again")
    seen = ""
    if cut and reasons:
        seen = f" The trial counted {cut.recompilations} recompilations; the first reason: {reasons[0]}."
    return kit.Finding(
        severity="warning" if left_eager or versions > limit else "info",
        title=title,
        explanation=f"Dynamo keeps {limit} versions of a function. If it needs another one, it runs the "
        f"function without compilation.{seen}",
        evidence={
            "blocks_with_cache": versions,
            "recompile_limit": limit,
            "left_eager": left_eager or (),
            "recompilations": cut.get("recompilations") if cut else None,
            "reasons": reasons,
        },
        treatment=treatment(facts, reasons, cached=versions > 1),
    )


def treatment(facts: kit.Facts, reasons: tuple[str, ...], cached: bool) -> kit.Treatment:
    """Remove the cause of the versions, or allow more of them."""
    if cached or (facts.training.use_cache and any("past_key_values" in reason for reason in reasons)):
        code = kit.compile_coverage.cache_off(facts)
        return kit.Treatment(name="cache-off", summary="train without a KV cache", code=code)
    if any(map(SHAPES.search, reasons)):
        return PAD
    old = (facts.get("software.torch") or "").startswith("2.6.")
    return kit.Treatment(
        name="raise-recompile-limit",
        summary="raise the limit, so Dynamo compiles every version",
        code=f"torch._dynamo.config.{'cache_size_limit' if old else 'recompile_limit'} = 64",
    )


def cached_blocks(facts: kit.Facts) -> int:
    """Count the blocks compiled one by one below the cache's module; each is a version of one function."""
    marked = [mark.name.rpartition(".")[0] for mark in facts.training.compile_marks if mark.name]
    holder = facts.get("training.cache_holder")
    within = f"{holder}." if holder else ""
    lists = (blocks.name for blocks in facts.network.blocks if blocks.name.startswith(within))
    return max(map(marked.count, lists), default=0)


def _blocks(use_cache: bool) -> kit.Facts:
    marks = tuple(kit.CompileMark(name=f"model.layers.{number}") for number in range(32))
    blocks = (kit.Blocks(name="model.layers", count=32),)
    return kit.example(blocks=blocks, wrappers=(), compile_marks=marks, use_cache=use_cache)


FIRES = _blocks(use_cache=True)
SILENT = _blocks(use_cache=False)
