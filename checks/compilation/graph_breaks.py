"""Graph breaks inside the compiled layers

At a break the graph ends, and the code up to the next graph is not compiled. The casts of an FP8 Linear can
no longer be fused with the norm or activation next to it. In a loop or a try block the whole frame is not
compiled. Calling compiled blocks in an uncompiled loop is no break.

    def forward(self, x):
        print("mean", x.mean())                # before: breaks every block

    def forward(self, x):
        if not torch.compiler.is_compiling():  # after: left out of the graph
            print("mean", x.mean())

`block.compile(fullgraph=True)` raises at the line that breaks. Ignore breaks outside the layers, and those of
Transformer Engine, whose casts are separate kernels: both are only information. Dynamo counts no break at a
branch that depends on data, so the trial also compares the regions per step with what whole blocks make.
https://docs.pytorch.org/docs/stable/torch.compiler_faq.html
"""

from packaging.version import Version

from fp8doctor import kit

SPLIT, OTHERS = 1.5, 4
"""Regions per block, and regions beyond the blocks, from which blocks count as split. A choice: every second
block in two pieces, and a compiled loss or optimizer has a few regions of its own."""

TRACED_SINCE = Version("2.20")
"""First Transformer Engine whose plain Linear Dynamo traces, without delayed scaling. Source: its notes."""

FULLGRAPH = kit.Treatment(
    name="show-graph-breaks",
    summary="compile with fullgraph=True, and fix the line that the error names",
    code="block.compile(fullgraph=True)   # raises at the line that breaks",
)


@kit.check("CMP003", "graph-breaks", severity="warning", explained_by=("CMP002",), **kit.BROKEN_IN_BF16_TOO)
def graph_breaks(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    if not facts.training.compile_marks:
        return kit.NotApplicable(reason="nothing asks for torch.compile")
    as_is = kit.arms.arm(facts, kit.ArmName.AS_IS)
    if as_is is None:
        if known := of_transformer_engine(facts):
            return known
        return kit.NotApplicable(reason="the trial did not time your step") if facts.trial else None
    cut, ran = as_is.cuts[-1], as_is.graphs_run or 0
    whole = kit.cost.micro_batches(facts) * whole_regions(facts, cut)
    split = ran >= max(SPLIT * whole, whole + OTHERS)
    if not cut.graph_breaks and not split:
        return None
    compiled = [each for each in facts.network.linears if each.compiled is not None]
    fp8, reasons = sum(map(kit.needs_compile, compiled)), cut.get("break_reasons", ())
    te = bool(reasons) and any(kit.stack_of(each).under_autocast for each in compiled)
    harmful = bool(fp8) and split
    title = f"Compiled blocks run in pieces: {ran} regions per step instead of {whole}"
    also = " Dynamo counts no break at a branch that depends on data, such as `if x.isnan().any()`."
    if cut.graph_breaks:
        first = reasons[0].partition(":")[0] if reasons else "the reason was not recorded"
        verb = "split" if harmful else "did not split"
        title = f"{kit.plural(cut.graph_breaks, 'graph break')} {verb} the compiled FP8 layers: {first}"
        also = ""
    if harmful:
        also = f" Their {kit.plural(fp8, 'FP8 Linear')} need the compiler to fuse the casts.{also}"
    return kit.Finding(
        severity="warning" if harmful else "info",
        title=title,
        explanation=f"One step entered {kit.plural(ran, 'compiled region')}; whole blocks would make "
        f"{whole}.{also}",
        evidence={
            "graph_breaks": cut.graph_breaks,
            "reasons": reasons,
            "graphs_run": as_is.graphs_run,
            "whole_regions": whole,
            "compiled_fp8_linears": fp8,
        },
        treatment=traceable_te(facts) if te and "compiler.disable" in reasons[0] else FULLGRAPH,
    )


def of_transformer_engine(facts: kit.Facts) -> kit.Finding | None:
    """Report compiled modules of Transformer Engine at which Dynamo breaks, by their release."""
    release = kit.installed(facts, "transformer_engine")
    broken = [
        each
        for each in facts.network.linears
        if release and kit.stack_of(each).under_autocast and each.compiled is not None
        if each.get("recipe") == "delayed" or release < TRACED_SINCE or not each.kind.endswith(".Linear")
    ]
    if not broken:
        return None
    return kit.Finding(
        severity="info",
        title=f"Dynamo breaks at {kit.plural(len(broken), 'compiled layer')} of Transformer Engine {release}",
        explanation="Dynamo does not trace these modules: it compiles what lies between them.",
        evidence={"layers": len(broken), "first": broken[0].name, "release": str(release)},
        treatment=traceable_te(facts),
    )


def traceable_te(facts: kit.Facts) -> kit.Treatment:
    return kit.Treatment(
        name="traceable-te",
        summary="use te.Linear of Transformer Engine 2.20 without delayed scaling, or do not compile these",
        code=kit.recipe_support.transformer_engine_line(facts, TRACED_SINCE),
    )


def whole_regions(facts: kit.Facts, cut: kit.facts.ArmCut) -> int:
    """Count regions per micro-batch if no block is split: marked modules, or the blocks of a marked model."""
    lists = {blocks.name: cut.blocks.get(blocks.name, blocks.count) for blocks in facts.network.blocks}
    marks = [mark.name for mark in facts.training.compile_marks]
    marked = {name.rpartition(".")[0]: entries(name, facts) for name in marks if name}
    blocks = sum(count * marked[name] for name, count in lists.items() if name in marked)
    beside = (name for name in marks if not name or name.rpartition(".")[0] not in lists)
    others = sum(entries(name, facts) for name in beside)
    return blocks + others if blocks else max(others, sum(lists.values()))


def entries(mark: str, facts: kit.Facts) -> int:
    """Count how often one forward and backward enter this region: twice if a checkpoint may be around it."""
    for each in facts.get("training.checkpointing", ()):
        recomputes = each.active is not False
        if recomputes and kit.compile_coverage.is_below(mark, each.name):
            return 2
    return 1


def _compiled_blocks(regions: int, breaks: int) -> kit.Facts:
    cut = kit.facts.ArmCut(blocks={}, graph_breaks=breaks, break_reasons=())
    marks = tuple(kit.CompileMark(name=f"blocks.{number}") for number in range(4))
    arms = (kit.variant(kit.ArmName.AS_IS, 10.0, graphs_run=regions, cuts=(cut,)),)
    layers, blocks = (kit.float8(compiled="blocks.0"),), (kit.Blocks(name="blocks", count=4),)
    return kit.example(linears=layers, blocks=blocks, compile_marks=marks, device="cuda", arms=arms)


FIRES = _compiled_blocks(regions=8, breaks=2)
SILENT = _compiled_blocks(regions=4, breaks=0)
