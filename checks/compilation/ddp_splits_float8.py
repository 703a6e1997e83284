"""DDP splits the graph of an older torchao

What it finds. torchao 0.12 or older is compiled under DistributedDataParallel, and raises there.

Why it matters. To send gradients while the backward still runs, Dynamo splits a graph under DDP at the ends
of DDP's buckets (`torch._dynamo.config.optimize_ddp`, on by default). A Float8Linear of torchao up to 0.12
does not survive the split. The first step raises "BackendCompilerFailed: backend='compile_fn' raised:
RuntimeError: val", or "AttributeError: 'bool' object has no attribute 'op'". Neither names FP8 or DDP.
Without compilation, FP8 is slower than BF16. Blocks compiled one by one are split too, if they hold more than
the first bucket (1 MiB).

Fix. Install torchao 0.13 or newer. If you cannot, set `torch._dynamo.config.optimize_ddp = False` before the
first step: gradients are then sent after each graph's backward, with less overlap.

    pip install "torchao==0.12.0"  # before

    pip install "torchao>=0.13.0"  # after

When to ignore it. If your step runs: then this job is not affected.

How it is detected, and limits. fp8doctor reads torchao's version, DDP, the setting, and the trained FP8
layers in each compiled graph. The backend "eager", frozen FP8 layers with adapters, and MX layers do not
raise. A pre-release of 0.13 is unknown.

References. On a CPU with torch 2.8, torchao 0.10 and 0.12 raised, 0.13 and 0.14 ran
(`tests/versions/ddp_and_compile.md`). With torchao 0.18 and torch 2.11 a job on two H200s ran all its FP8
matmuls. https://github.com/pytorch/ao/issues/2586 https://github.com/pytorch/pytorch/issues/158936
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.analysis.recipe_support import installed
from fp8doctor.facts import (
    CompileMark,
    Distributed,
    Dynamo,
    Facts,
    Linear,
    Network,
    Package,
    Unrecorded,
)
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

FIXED = Version("0.13.0")
"""First torchao whose layers survive the split. Run: ``tests/versions/ddp_and_compile.md``."""

FIRST_BUCKET_MIB = 1.0
"""A graph with fewer parameters is not split. Source: ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``,
torch 2.8 to 2.13; one of 0.25 MiB ran."""

EAGER = "eager"
"""The backend that runs the graph as it is. It did not raise."""


@check("CMP008", "ddp-splits-float8", area="compilation", severity="error", changes_fp8=True)
def ddp_splits_float8(facts: Facts) -> Finding | NotApplicable | None:
    graphs = list(filter(None, (in_graph(mark, facts.network) for mark in facts.training.compile_marks)))
    if not graphs:
        return NotApplicable(reason="no torchao FP8 Linear is compiled")
    distributed = facts.training.distributed
    if distributed is None or distributed.wrapper != "DDP":
        return NotApplicable(reason="no DistributedDataParallel around the model")
    dynamo = facts.training.dynamo
    if dynamo.disabled or dynamo.stance == "force_eager":
        return NotApplicable(reason="Dynamo is switched off (CMP002)")
    if facts.get("observed.steps_ms"):
        return None  # it ran
    around = distributed.get("wrapper_at") or ""
    split = {
        linear.name: linear
        for graph in graphs
        if mib(graph) > FIRST_BUCKET_MIB
        for linear in graph
        if linear.requires_grad and is_below(linear, around)
    }
    if not distributed.optimize_ddp or not split or (version := torchao_version(facts)) >= FIXED:
        return None
    return Finding(
        title=f"DDP splits the graphs of {plural(len(split), 'FP8 Linear')}, so torchao {version} raises",
        explanation="The first step ends with \"BackendCompilerFailed: backend='compile_fn' raised: "
        "RuntimeError: val\", or with an AttributeError about 'op'. Neither names FP8 or DDP.",
        breaks="step_raises",
        evidence={"torchao": str(version), "fp8_linears": len(split), "first": next(iter(split))},
        treatment=Treatment(
            name="upgrade-torchao",
            summary="install a torchao that survives the split, or stop Dynamo from splitting at DDP's "
            "buckets",
            code=f'pip install "torchao>={FIXED}"     # or torch._dynamo.config.optimize_ddp = False',
        ),
    )


def in_graph(mark: CompileMark, network: Network) -> list[Linear]:
    """List the FP8 layers that a mark really compiles."""
    return [
        each
        for each in network.linears
        if mark.backend != EAGER and is_below(each, mark.name) and each.compiled is not None
        if each.stack == "torchao" and each.kind.endswith(".Float8Linear")
    ]


def mib(linears: list[Linear]) -> float:
    """Sum the trained weights in MiB, kept in 16 bits or fp32. Frozen ones are in no bucket."""
    trained = (each for each in linears if each.requires_grad)
    return sum(each.parameters * (4 if each.dtype == "float32" else 2) for each in trained) / 2**20


def torchao_version(facts: Facts) -> Version:
    """Read torchao's version. Raises `Unrecorded` if it cannot be parsed, or may or may not hold the fix."""
    version = installed(facts, "torchao")
    if version is None:
        raise Unrecorded(Package, "version", "torchao's version cannot be parsed")
    on_the_way = version.is_prerelease or "git" in (version.local or "")
    if on_the_way and version.release == FIXED.release:
        raise Unrecorded(Package, "version", f"whether torchao {version} has the fix of 0.13 is unknown")
    return version


def _below_ddp(torchao: str) -> Facts:
    return example(
        packages={"torchao": torchao},
        linears=(float8(compiled=""),),
        compile_marks=(CompileMark(name="", form="wrapped", backend="inductor"),),
        dynamo=Dynamo(disabled=False, suppress_errors=False, stance="default"),
        distributed=Distributed(world_size=8, wrapper="DDP", optimize_ddp=True),
    )


FIRES = _below_ddp(torchao="0.12.0")
SILENT = _below_ddp(torchao="0.13.0")
