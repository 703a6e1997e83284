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

from __future__ import annotations

import re

from fp8doctor.kit import (
    ArmName,
    Blocks,
    CompileMark,
    Facts,
    Finding,
    NotApplicable,
    Reason,
    Treatment,
    check,
    compile_coverage,
    example,
    why_of,
)

RECOMPILE_LIMIT = 8
"""Versions of one function that Dynamo keeps by default. Source: ``recompile_limit`` in
``torch/_dynamo/config.py``, torch 2.7 to 2.13; ``cache_size_limit``, equally 8, in 2.6."""

SHAPES = re.compile(r"size mismatch|stride mismatch|\.(size|stride)\(|shape", re.IGNORECASE)
"""Guards on a shape: ``tensor 'x' size mismatch at index 0. ...`` Source: torch/csrc/dynamo/guards.cpp."""

PAD = "collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=256)   # a few lengths"


@check(
    "CMP005",
    "recompilation",
    area="compilation",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
)
def recompilation(facts: Facts) -> Finding | NotApplicable | None:
    training = facts.training
    if not training.compile_marks:
        return NotApplicable(reason="nothing asks for torch.compile")
    timed = next((arm for arm in facts.arms() if arm.name == ArmName.AS_IS), None)
    cut = timed.cuts[-1] if timed and timed.get("cuts") else None
    left_eager, reasons = (cut.get("left_eager"), cut.get("recompile_reasons", ())) if cut else ((), ())
    compiling = timed is not None and why_of(timed) is Reason.STILL_COMPILING
    versions = cached_blocks(facts) if training.use_cache else 0
    limit = facts.get("training.dynamo.recompile_limit") or RECOMPILE_LIMIT
    if cut and left_eager == () and (sum(cut.blocks.values()) or versions) > limit:
        versions = (
            0  # more blocks ran than the limit, and none was left: the step switches the cache off itself
        )
    cases = (
        (
            versions > limit,
            f"A KV cache leaves {versions - limit} of {versions} blocks uncompiled in training",
        ),
        (versions > 1, f"A KV cache makes {versions} blocks compile {versions} times instead of once"),
        (left_eager, f"{(left_eager or ('',))[0]} reached the recompile limit and is no longer compiled"),
        (compiling, "Dynamo was still compiling after the warm-up"),
    )
    title = next((title for holds, title in cases if holds), None)
    if title is None:
        return None if timed else NotApplicable(reason="only a trial shows whether frames are compiled again")
    of_cache = training.use_cache and any("past_key_values" in reason for reason in reasons)
    name = "cache_size_limit" if (facts.get("software.torch") or "").startswith("2.6.") else "recompile_limit"
    fixes = (
        (
            versions > 1 or of_cache,
            "cache-off",
            "train without a KV cache",
            compile_coverage.cache_off(facts),
        ),
        (
            any(map(SHAPES.search, reasons)),
            "pad-to-few-lengths",
            "pad batches to a few lengths, or compile with dynamic=True",
            PAD,
        ),
        (
            True,
            "raise-recompile-limit",
            "raise the limit, so Dynamo compiles every version",
            f"torch._dynamo.config.{name} = 64",
        ),
    )
    fix = next(fix for holds, *fix in fixes if holds)
    seen = ""
    if cut and reasons:
        seen = f" The trial counted {cut.recompilations} recompilations; the first reason: {reasons[0]}."
    return Finding(
        severity="warning" if left_eager or compiling or versions > limit else "info",
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
        treatment=Treatment(name=fix[0], summary=fix[1], code=fix[2]),
    )


def cached_blocks(facts: Facts) -> int:
    """Count the blocks compiled one by one below the cache's module; each is a version of one function."""
    marked = [mark.name.rpartition(".")[0] for mark in facts.training.compile_marks if mark.name]
    holder = facts.get("training.cache_holder")
    within = f"{holder}." if holder else ""
    lists = (blocks.name for blocks in facts.network.blocks if blocks.name.startswith(within))
    return max(map(marked.count, lists), default=0)


def _blocks(use_cache: bool) -> Facts:
    marks = tuple(CompileMark(name=f"model.layers.{number}") for number in range(32))
    blocks = (Blocks(name="model.layers", count=32),)
    return example(blocks=blocks, wrappers=(), compile_marks=marks, use_cache=use_cache)


FIRES = _blocks(use_cache=True)
SILENT = _blocks(use_cache=False)
