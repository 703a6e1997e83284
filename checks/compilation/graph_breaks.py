"""Graph breaks inside the compiled layers

What it finds. Dynamo broke the graph inside compiled FP8 blocks, so one step runs many more regions than
blocks.

Why it matters. At a break the graph ends. The casts of an FP8 Linear can no longer be fused with the norm or
activation next to it. The code between two graphs is not compiled. A break in a loop or a try block is worse.
The whole frame is not compiled, and each function that it calls is compiled by itself. A break outside the
layers costs next to nothing. Calling compiled blocks in an uncompiled loop is not a break.

Fix. Remove the call that breaks; the finding names its kind. To find the line, compile with
`block.compile(fullgraph=True)`, which raises there.

    def forward(self, x):
        print("mean", x.mean())                # before: breaks every block

    def forward(self, x):
        if not torch.compiler.is_compiling():  # after: left out of the graph
            print("mean", x.mean())

When to ignore it. If the breaks are outside the layers, or the layers are Transformer Engine's: its casts are
separate kernels. Both are only information. Compiled around the breaks, Transformer Engine gains with many
tokens and loses with few.

How it is detected, and limits. The trial counts graph breaks, their reasons, and the compiled regions per
step. It compares these with blocks, micro-batches and recomputed forwards. Dynamo counts no break at a branch
that depends on data. Transformer Engine's modules break up to 2.19, in 2.20 only the fused ones; this needs
no trial.

References. One H200 (torch 2.11, torchao 0.18, TE 2.20.2); reasons from torch 2.13.
https://docs.pytorch.org/docs/stable/torch.compiler_faq.html
https://meta-pytorch.org/compile-graph-break-site/ https://github.com/NVIDIA/TransformerEngine/pull/3053
"""

from __future__ import annotations

import re
from typing import NamedTuple

from packaging.version import Version

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.compile_coverage import needs_compile
from fp8doctor.analysis.recipe_support import CUDNN_FLOOR, installed
from fp8doctor.cost import micro_batches
from fp8doctor.facts import ArmCut, ArmName, Blocks, CompileMark, Facts, recorded
from fp8doctor.facts.examples import example, float8, variant
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

SPLIT, OTHERS = 1.5, 4
"""Blocks count as split from this many regions per block, and at least this many more regions than blocks: a
compiled loss or optimizer has a few of its own. A choice: every second block in two pieces."""

AROUND_THE_CALL = ("huggingface", "unsloth")
"""Forms that recompute outside what ``layer.compile()`` compiles; transformers does so before 5.23."""

TRACED_SINCE = {".Linear": Version("2.20"), ".BasicLinear": Version("2.21")}
"""Modules of Transformer Engine that Dynamo traces, by the notes of these releases. Up to 2.19, all have
``no_torch_dynamo``."""

WITHOUT_RECOMPUTE = ("compiler_budget", "offload")
"""Forms that enter no region again: the compiler recomputes inside its own graph, an offload fetches."""


class BreakKind(NamedTuple):
    """What breaks a graph: its name in Dynamo's reasons (torch 2.6 to 2.13), and the fix."""

    pattern: str
    words: str
    name: str
    summary: str
    code: str


KINDS = (
    BreakKind(
        r"`?print`?\b|logg(ing|er)|warn",
        "a print, warning or log call",
        "log-outside-graph",
        "keep prints, warnings and log calls out of the graph",
        "if not torch.compiler.is_compiling():\n    print(...)   # the call that breaks",
    ),
    BreakKind(
        r"\.item\b|_local_scalar_dense|tolist|capture_scalar_outputs",
        "a value read back from a tensor, such as .item()",
        "keep-values-on-gpu",
        "keep the value in a tensor",
        "scale = x.abs().amax()          # a tensor: without .item(), float() or tolist()",
    ),
    BreakKind(
        r"data.dependent|dynamic (shape operator|control flow)|nonzero",
        "control flow or a shape that depends on data",
        "select-without-branch",
        "select with a mask of fixed shape",
        "x = torch.where(condition, a, b)   # instead of: if condition: ... or x[condition]",
    ),
    BreakKind(
        r"compiler\.disable|dynamo\.disable",
        "a function under torch.compiler.disable",
        "allow-in-graph",
        "remove torch.compiler.disable from functions that the layers call",
        "# @torch.compiler.disable         remove it, or call the function outside the block",
    ),
)
OTHER = BreakKind(
    "",
    "",
    "show-graph-breaks",
    "compile with fullgraph=True, and fix the line that the error names",
    "block.compile(fullgraph=True)   # raises at the line that breaks",
)
TE = BreakKind(
    "",
    "Transformer Engine's modules",
    "traceable-te",
    "use te.Linear of Transformer Engine 2.20 with a recipe other than delayed scaling, or do not compile "
    "these modules",
    'pip install --no-build-isolation "transformer-engine[pytorch]>=2.20"   # needs cuDNN '
    f"{CUDNN_FLOOR} or newer",
)


@check(
    "CMP003",
    "graph-breaks",
    area="compilation",
    severity="warning",
    changes_fp8=True,
    invalidates_model=True,
    stays_in_bf16=True,
    explained_by=("CMP002",),
)
def graph_breaks(facts: Facts) -> Finding | NotApplicable | None:
    marks = facts.training.compile_marks
    if not marks:
        return NotApplicable(reason="nothing asks for torch.compile")
    if not recorded(facts, "trial") and (known := known_breaks(facts)):
        return known
    as_is = arm(facts.trial, ArmName.AS_IS)
    if as_is is None:
        return known_breaks(facts) or NotApplicable(reason="the trial did not time your step")
    cut = as_is.cuts[-1]
    passes = micro_batches(facts)
    whole = passes * whole_regions(facts, cut)
    split = (as_is.graphs_run or 0) >= max(SPLIT * whole, whole + OTHERS)
    if not cut.graph_breaks and not split:
        return None
    fp8 = [each for each in facts.network.linears if needs_compile(each) and each.compiled is not None]
    harmful = bool(fp8) and split
    reasons = cut.get("break_reasons", ())
    kind = kind_of(reasons[0] if reasons else "", facts)
    words = kind.words or (reasons[0].partition(":")[0] if reasons else "the reason was not recorded")
    title = (
        f"{plural(cut.graph_breaks, 'graph break')} {'split' if harmful else 'did not split'} the compiled "
    )
    title += f"FP8 layers; the first is at {words}"
    return Finding(
        severity="warning" if harmful else "info",
        title=title
        if cut.graph_breaks
        else f"Compiled blocks run in pieces: {as_is.graphs_run} regions per step instead of {whole}",
        explanation=f"One step entered {plural(as_is.graphs_run or 0, 'compiled region')}; whole blocks "
        f"would make {whole}"
        + (f" in {passes} micro-batches." if passes > 1 else ".")
        + (f" Their {plural(len(fp8), 'FP8 Linear')} need the compiler to fuse the casts." if harmful else "")
        + (
            ""
            if cut.graph_breaks
            else " Dynamo counts no break at a branch that depends on data, such as `if x.isnan().any()`."
        ),
        evidence={
            "graph_breaks": cut.graph_breaks,
            "reasons": reasons,
            "graphs_run": as_is.graphs_run,
            "whole_regions": whole,
            "compile_marks": len(marks),
            "compiled_fp8_linears": len(fp8),
        },
        treatment=Treatment(name=kind.name, summary=kind.summary, code=kind.code),
    )


def known_breaks(facts: Facts) -> Finding | None:
    """Report compiled modules of Transformer Engine at which Dynamo breaks, by their release."""
    release = installed(facts, "transformer_engine")
    if release is None:
        return None
    broken = [
        each
        for each in facts.network.linears
        if stack_of(each).under_autocast
        and each.compiled is not None
        and (
            each.get("recipe") == "delayed"
            or not any(release >= since and each.kind.endswith(end) for end, since in TRACED_SINCE.items())
        )
    ]
    if not broken:
        return None
    return Finding(
        severity="info",
        title=f"{plural(len(broken), 'compiled layer')} of Transformer Engine {release} "
        f"{'breaks' if len(broken) == 1 else 'break'} the graph",
        explanation="Dynamo does not trace these modules: it compiles what lies between them.",
        evidence={"layers": len(broken), "first": broken[0].name, "release": str(release)},
        treatment=Treatment(name=TE.name, summary=TE.summary, code=TE.code),
    )


def whole_regions(facts: Facts, cut: ArmCut) -> int:
    """Count the regions that one micro-batch enters if no block is split.

    They are marked blocks and modules, or all blocks of a model compiled from above: a split between blocks
    costs no speed. A recomputed region is entered twice.
    """
    lists = {blocks.name: cut.blocks.get(blocks.name, blocks.count) for blocks in facts.network.blocks}
    marks = [mark.name for mark in facts.training.compile_marks]
    marked = {name.rpartition(".")[0]: entries(name, cut, facts) for name in marks if name}
    blocks = sum(count * marked[name] for name, count in lists.items() if name in marked)
    others = sum(
        entries(name, cut, facts) for name in marks if not name or name.rpartition(".")[0] not in lists
    )
    return blocks + others if blocks else max(others, sum(lists.values()))


def entries(mark: str, cut: ArmCut, facts: Facts) -> int:
    """Count how often one forward and backward enter this region: twice under a checkpoint.

    If wrapper and region have the same name, either may be the outer one: then only a counted break proves
    pieces. A checkpoint that only a run could see (``active`` None) counts.
    """
    checkpointing = facts.get("training.checkpointing", ())
    for each in checkpointing:
        if each.active is False or each.form in WITHOUT_RECOMPUTE:
            continue
        above = mark != each.name and (not each.name or mark.startswith(f"{each.name}."))
        if above or (mark == each.name and (each.form in AROUND_THE_CALL or not cut.graph_breaks)):
            return 2
    return 1


def kind_of(reason: str, facts: Facts) -> BreakKind:
    """Find the kind that a reason names; a disabled function is Transformer Engine's if it is compiled."""
    kind = next((kind for kind in KINDS if re.search(kind.pattern, reason, re.IGNORECASE)), OTHER)
    te = any(stack_of(each).under_autocast and each.compiled is not None for each in facts.network.linears)
    return TE if te and kind is KINDS[-1] else kind


def _compiled_blocks(regions: int, breaks: int) -> Facts:
    reason = "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print`"
    cut = ArmCut(blocks={}, graph_breaks=breaks, break_reasons=(reason,) * (breaks > 0))
    marks = tuple(CompileMark(name=f"blocks.{number}") for number in range(4))
    model = {"linears": (float8(compiled="blocks.0"),), "blocks": (Blocks(name="blocks", count=4),)}
    arms = (variant(ArmName.AS_IS, 10.0, graphs_run=regions, cuts=(cut,)),)
    return example(**model, compile_marks=marks, device="cuda", arms=arms)


FIRES = _compiled_blocks(regions=8, breaks=2)
SILENT = _compiled_blocks(regions=4, breaks=0)
