"""Graph breaks inside the compiled layers

At a break the graph ends, and the code up to the next graph is not compiled. The casts of an FP8 Linear can
no longer be fused with the norm or activation next to it. A break in a loop or a try block is worse: its
frame is not compiled, and each function it calls is compiled by itself. A break outside the layers costs next
to nothing, and calling compiled blocks in an uncompiled loop is no break.

    def forward(self, x):
        print("mean", x.mean())                # before: breaks every block

    def forward(self, x):
        if not torch.compiler.is_compiling():  # after: left out of the graph
            print("mean", x.mean())

Remove the call that breaks; the finding names its kind. To find the line, compile with
`block.compile(fullgraph=True)`, which raises there. Ignore breaks outside the layers, and those of
Transformer Engine, whose casts are separate kernels: both are only information. Its modules break up to 2.19,
in 2.20 only the fused ones. The trial counts breaks, their reasons, and compiled regions per step, and
compares these with blocks, micro-batches and recomputed forwards. Dynamo counts no break at a branch that
depends on data.
https://docs.pytorch.org/docs/stable/torch.compiler_faq.html
https://meta-pytorch.org/compile-graph-break-site/
"""

from __future__ import annotations

import re

from packaging.version import Version

from fp8doctor.kit import (
    CUDNN_FLOOR,
    ArmCut,
    ArmName,
    Blocks,
    CompileMark,
    Facts,
    Finding,
    NotApplicable,
    Treatment,
    arm_if_any,
    check,
    example,
    float8,
    installed,
    micro_batches,
    needs_compile,
    plural,
    stack_of,
    variant,
)

SPLIT, OTHERS = 1.5, 4
"""Blocks count as split from this many regions per block, and at least this many more regions than blocks: a
compiled loss or optimizer has a few of its own. A choice: every second block in two pieces."""

AROUND_THE_CALL = ("huggingface", "unsloth")
"""Forms that recompute outside what ``layer.compile()`` compiles; transformers does so before 5.23."""

WITHOUT_RECOMPUTE = ("compiler_budget", "offload")
"""Forms that enter no region again: the compiler recomputes inside its own graph, an offload fetches."""

TRACED_SINCE = {".Linear": Version("2.20"), ".BasicLinear": Version("2.21")}
"""Modules of Transformer Engine that Dynamo traces, by the notes of these releases. Up to 2.19, all have
``no_torch_dynamo``."""

DISABLED = r"compiler\.disable|dynamo\.disable"

KINDS = {
    r"`?print`?\b|logg(ing|er)|warn": (
        "a print, warning or log call",
        "log-outside-graph",
        "keep prints, warnings and log calls out of the graph",
        "if not torch.compiler.is_compiling():\n    print(...)   # the call that breaks",
    ),
    r"\.item\b|_local_scalar_dense|tolist|capture_scalar_outputs": (
        "a value read back from a tensor, such as .item()",
        "keep-values-on-gpu",
        "keep the value in a tensor",
        "scale = x.abs().amax()          # a tensor: without .item(), float() or tolist()",
    ),
    r"data.dependent|dynamic (shape operator|control flow)|nonzero": (
        "control flow or a shape that depends on data",
        "select-without-branch",
        "select with a mask of fixed shape",
        "x = torch.where(condition, a, b)   # instead of: if condition: ... or x[condition]",
    ),
    DISABLED: (
        "a function under torch.compiler.disable",
        "allow-in-graph",
        "remove torch.compiler.disable from functions that the layers call",
        "# @torch.compiler.disable         remove it, or call the function outside the block",
    ),
    "": (
        "",
        "show-graph-breaks",
        "compile with fullgraph=True, and fix the line that the error names",
        "block.compile(fullgraph=True)   # raises at the line that breaks",
    ),
}
"""What breaks a graph, in Dynamo's reasons (torch 2.6 to 2.13) -> its name, and the fix."""

TE = (
    "Transformer Engine's modules",
    "traceable-te",
    "use te.Linear of Transformer Engine 2.20 with a recipe other than delayed scaling, or do not compile "
    "these modules",
    'pip install --no-build-isolation "transformer-engine[pytorch]>=2.20"   '
    f"# needs cuDNN {CUDNN_FLOOR} or newer",
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
    if not facts.training.compile_marks:
        return NotApplicable(reason="nothing asks for torch.compile")
    as_is = arm_if_any(facts, ArmName.AS_IS)
    if as_is is None:
        known = _of_transformer_engine(facts)
        return known or (NotApplicable(reason="the trial did not time your step") if facts.trial else None)
    cut, passes, ran = as_is.cuts[-1], micro_batches(facts), as_is.graphs_run or 0
    whole = passes * _whole_regions(facts, cut)
    split = ran >= max(SPLIT * whole, whole + OTHERS)
    if not cut.graph_breaks and not split:
        return None
    fp8 = [each for each in facts.network.linears if needs_compile(each) and each.compiled is not None]
    harmful, reasons = bool(fp8) and split, cut.get("break_reasons", ())
    pattern = next(each for each in KINDS if re.search(each, (reasons or ("",))[0], re.IGNORECASE))
    te = any(stack_of(each).under_autocast and each.compiled is not None for each in facts.network.linears)
    words, name, summary, code = TE if te and pattern == DISABLED else KINDS[pattern]
    words = words or (reasons[0].partition(":")[0] if reasons else "the reason was not recorded")
    title = f"Compiled blocks run in pieces: {ran} regions per step instead of {whole}"
    also = " Dynamo counts no break at a branch that depends on data, such as `if x.isnan().any()`."
    if cut.graph_breaks:
        title = (
            f"{plural(cut.graph_breaks, 'graph break')} {'split' if harmful else 'did not split'} the "
            f"compiled FP8 layers; the first is at {words}"
        )
        also = ""
    need = f" Their {plural(len(fp8), 'FP8 Linear')} need the compiler to fuse the casts." if harmful else ""
    return Finding(
        severity="warning" if harmful else "info",
        title=title,
        explanation=f"One step entered {plural(ran, 'compiled region')}; whole blocks would make {whole}"
        f"{f' in {passes} micro-batches' if passes > 1 else ''}.{need}{also}",
        evidence={
            "graph_breaks": cut.graph_breaks,
            "reasons": reasons,
            "graphs_run": as_is.graphs_run,
            "whole_regions": whole,
            "compiled_fp8_linears": len(fp8),
        },
        treatment=Treatment(name=name, summary=summary, code=code),
    )


def _of_transformer_engine(facts: Facts) -> Finding | None:
    """Report compiled modules of Transformer Engine at which Dynamo breaks, by their release."""
    release = installed(facts, "transformer_engine")
    broken = [
        each
        for each in facts.network.linears
        if release and stack_of(each).under_autocast and each.compiled is not None
        if each.get("recipe") == "delayed"
        or not any(release >= since and each.kind.endswith(end) for end, since in TRACED_SINCE.items())
    ]
    if not broken:
        return None
    return Finding(
        severity="info",
        title=f"{plural(len(broken), 'compiled layer')} of Transformer Engine {release} "
        f"{'breaks' if len(broken) == 1 else 'break'} the graph",
        explanation="Dynamo does not trace these modules: it compiles what lies between them.",
        evidence={"layers": len(broken), "first": broken[0].name, "release": str(release)},
        treatment=Treatment(name=TE[1], summary=TE[2], code=TE[3]),
    )


def _whole_regions(facts: Facts, cut: ArmCut) -> int:
    """Count the regions that one micro-batch enters if no block is split.

    They are marked blocks and modules, or all blocks of a model compiled from above: a split between blocks
    costs no speed. A recomputed region is entered twice.
    """
    lists = {blocks.name: cut.blocks.get(blocks.name, blocks.count) for blocks in facts.network.blocks}
    marks = [mark.name for mark in facts.training.compile_marks]
    marked = {name.rpartition(".")[0]: _entries(name, cut, facts) for name in marks if name}
    blocks = sum(count * marked[name] for name, count in lists.items() if name in marked)
    beside = (name for name in marks if not name or name.rpartition(".")[0] not in lists)
    others = sum(_entries(name, cut, facts) for name in beside)
    return blocks + others if blocks else max(others, sum(lists.values()))


def _entries(mark: str, cut: ArmCut, facts: Facts) -> int:
    """Count how often one forward and backward enter this region: twice under a checkpoint.

    If wrapper and region have the same name, either may be the outer one: then only a counted break proves
    pieces. A checkpoint that only a run could see (``active`` None) counts.
    """
    for each in facts.get("training.checkpointing", ()):
        if each.active is False or each.form in WITHOUT_RECOMPUTE:
            continue
        above = mark != each.name and (not each.name or mark.startswith(f"{each.name}."))
        if above or (mark == each.name and (each.form in AROUND_THE_CALL or not cut.graph_breaks)):
            return 2
    return 1


def _compiled_blocks(regions: int, breaks: int) -> Facts:
    reason = "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print`"
    cut = ArmCut(blocks={}, graph_breaks=breaks, break_reasons=(reason,) * (breaks > 0))
    marks = tuple(CompileMark(name=f"blocks.{number}") for number in range(4))
    model = {"linears": (float8(compiled="blocks.0"),), "blocks": (Blocks(name="blocks", count=4),)}
    arms = (variant(ArmName.AS_IS, 10.0, graphs_run=regions, cuts=(cut,)),)
    return example(**model, compile_marks=marks, device="cuda", arms=arms)


FIRES = _compiled_blocks(regions=8, breaks=2)
SILENT = _compiled_blocks(regions=4, breaks=0)
