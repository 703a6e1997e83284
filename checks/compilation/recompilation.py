"""Code is compiled again and again

What it finds. Dynamo compiled frames again during the trial, reached its limit, was still compiling while
timing, or a KV cache will make it do so.

Why it matters. Dynamo keeps at most 8 versions of a function, and each costs seconds to compile. The ninth is
not compiled: the function runs without compilation from then on, with one warning in the log. Such an FP8
block is several times slower. A KV cache makes every block a version of its own, because the code checks
which layer of the cache it writes. Of 12 Llama blocks, 8 were compiled and 4 were not; without the cache one
version serves all 12. Nobody reads that cache in training.

Fix. Switch the cache off; checkpointing does so too. Pad batches to a few lengths. If you need many versions,
raise the limit: `torch._dynamo.config.recompile_limit = 64` (torch 2.7 or newer).

    for block in model.model.layers:      # before: one version per block
        block.compile()

    model.config.use_cache = False        # after: one for all
    for block in model.model.layers:
        block.compile()

When to ignore it. If the versions stay below the limit: this is only information.

How it is detected, and limits. fp8doctor reads Dynamo's counters and reasons in the trial. For transformers
models it also checks whether `use_cache` meets blocks compiled one by one. A model compiled as a whole has
one version either way. Without a trial, other recompilations are unknown.

References. On a CPU with transformers 5.23 and torch 2.13; on an H200 (torch 2.11), four GPT-2 blocks with
their cache were compiled four times. https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html
https://github.com/huggingface/transformers/blob/main/src/transformers/cache_utils.py
"""

from __future__ import annotations

import re

from fp8doctor.analysis.compile_coverage import cache_off
from fp8doctor.facts import ArmName, Blocks, CompileMark, Facts, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.examples import example
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

RECOMPILE_LIMIT = 8
"""Versions of one function that Dynamo keeps by default. Source: ``recompile_limit`` in
``torch/_dynamo/config.py``, torch 2.7 to 2.13; ``cache_size_limit``, equally 8, in 2.6."""

SHAPES = re.compile(r"size mismatch|stride mismatch|\.(size|stride)\(|shape", re.IGNORECASE)
"""Guards on a shape: ``tensor 'x' size mismatch at index 0. ...`` Source: torch/csrc/dynamo/guards.cpp."""

CACHE = "past_key_values"
"""The argument of transformers' blocks that carries the KV cache."""


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
    if not facts.training.compile_marks:
        return NotApplicable(reason="nothing asks for torch.compile")
    arms = facts.trial.arms if recorded(facts, "trial") else ()
    timed = next((arm for arm in arms if arm.name == ArmName.AS_IS), None)
    cut = timed.cuts[-1] if timed and timed.get("cuts") else None
    left_eager = cut.get("left_eager", ()) if cut else ()
    reasons = cut.get("recompile_reasons", ()) if cut else ()
    compiling = timed is not None and why_of(timed) is Reason.STILL_COMPILING
    versions, limit = cached_blocks(facts) if facts.training.use_cache else 0, recompile_limit(facts)
    if (
        cut
        and recorded(cut, "left_eager")
        and not left_eager
        and (sum(cut.blocks.values()) or versions) > limit
    ):
        # More blocks ran than the limit, and none was left eager: the step switches the cache off itself.
        versions = 0
    if not (left_eager or compiling or versions > 1):
        return None if timed else NotApplicable(reason="only a trial shows whether frames are compiled again")
    if versions > limit:
        title = f"A KV cache leaves {versions - limit} of {versions} blocks uncompiled in training"
    elif versions > 1:
        title = f"A KV cache makes {versions} blocks compile {versions} times instead of once"
    elif left_eager:
        title = f"{left_eager[0]} reached the recompile limit and is no longer compiled"
    else:
        title = "Dynamo was still compiling after the warm-up"
    seen = (
        f" The trial counted {cut.recompilations} recompilations; the first reason: {reasons[0]}."
        if cut and reasons
        else ""
    )
    return Finding(
        severity="warning" if left_eager or compiling or versions > limit else "info",
        title=title,
        explanation=f"Dynamo keeps {limit} versions of a function. If it needs another one, it runs the "
        f"function without compilation.{seen}",
        evidence={
            "blocks_with_cache": versions,
            "recompile_limit": limit,
            "left_eager": left_eager,
            "recompilations": cut.get("recompilations") if cut else None,
            "reasons": reasons,
        },
        treatment=treatment(facts, reasons, versions),
    )


def recompile_limit(facts: Facts) -> int:
    """Return the limit in this process, as far as it is known."""
    return facts.get("training.dynamo.recompile_limit") or RECOMPILE_LIMIT


def cached_blocks(facts: Facts) -> int:
    """Count the blocks compiled one by one below the cache's module; each is a version of one function."""
    marked = [mark.name.rpartition(".")[0] for mark in facts.training.compile_marks if mark.name]
    holder = facts.get("training.cache_holder")
    within = f"{holder}." if holder else ""
    lists = (blocks.name for blocks in facts.network.blocks if blocks.name.startswith(within))
    return max(map(marked.count, lists), default=0)


def treatment(facts: Facts, reasons: tuple[str, ...], versions: int) -> Treatment:
    """Remove the first reason: no cache, a few lengths, or a higher limit."""
    if versions > 1 or (facts.training.use_cache and any(CACHE in reason for reason in reasons)):
        return Treatment(name="cache-off", summary="train without a KV cache", code=cache_off(facts))
    if any(SHAPES.search(reason) for reason in reasons):
        code = "collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=256)   # a few lengths"
        return Treatment(
            name="pad-to-few-lengths",
            summary="pad batches to a few lengths, or compile with dynamic=True",
            code=code,
        )
    old = (facts.get("software.torch") or "").startswith("2.6.")
    name = "cache_size_limit" if old else "recompile_limit"
    return Treatment(
        name="raise-recompile-limit",
        summary="raise the limit, so Dynamo compiles every version",
        code=f"torch._dynamo.config.{name} = 64",
    )


def _blocks(use_cache: bool) -> Facts:
    marks = tuple(CompileMark(name=f"model.layers.{number}") for number in range(32))
    blocks = (Blocks(name="model.layers", count=32),)
    return example(blocks=blocks, wrappers=(), compile_marks=marks, use_cache=use_cache)


FIRES = _blocks(use_cache=True)
SILENT = _blocks(use_cache=False)
