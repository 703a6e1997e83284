"""DistributedDataParallel splits the graph of an older torchao

Looks at: torchao's training layers below DDP that `torch.compile` covers, the installed torchao,
and whether Dynamo cuts graphs where DDP's buckets end (`torch._dynamo.config.optimize_ddp`, on by
default).

Why it matters. So that gradients are sent while the backward still runs, Dynamo splits a graph
below DDP at the ends of the buckets. A Float8Linear of torchao up to 0.12 does not survive the
split: the first step raises "BackendCompilerFailed: backend='compile_fn' raised: RuntimeError:
val", or "AttributeError: 'bool' object has no attribute 'op'", and neither names FP8 or DDP. People
then leave the compilation out, and FP8 is slower than BF16. Blocks that are compiled one by one are
split as well, where they hold more than the first bucket, 1 MiB.

What to do. Install torchao 0.13 or newer. Where that cannot be, switch the splitting off: the
gradients are then sent at the end of each graph's backward, and overlap less.

    torchao==0.12.0                                   # before
    torchao>=0.13.0                                   # after
    torch._dynamo.config.optimize_ddp = False         # or, before the first step

The backend "eager" does not raise, and neither do frozen FP8 layers beside adapters, or MX layers.

Evidence: on a CPU with torch 2.8 torchao 0.10 and 0.12 raised, 0.13 and 0.14 ran
(`tests/versions/ddp_and_compile.md`). With torchao 0.18 and torch 2.11 a job of two H200s ran all
its FP8 GEMMs.
https://github.com/pytorch/ao/issues/2586
https://github.com/pytorch/pytorch/issues/158936
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.facts import (
    CompileMark,
    Distributed,
    Dynamo,
    Facts,
    Linear,
    Network,
    Package,
    Software,
    Training,
    Unrecorded,
    recorded,
)
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

MENDED = Version("0.13.0")
"""First torchao whose layers survive the split. Run: ``tests/versions/ddp_and_compile.md``."""

FIRST_BUCKET_MIB = 1.0
"""A graph with fewer parameters is not split. Source: ``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``,
torch 2.8 to 2.13; one of 0.25 MiB ran."""

EAGER = "eager"
"""The backend that runs the graph as it is. It did not raise."""


@check("CMP008", "ddp-splits-float8", area="compilation", severity="error", changes_fp8=True, may_raise=True)
def ddp_splits_float8(facts: Facts) -> Finding | NotApplicable | None:
    graphs = list(filter(None, (in_graph(mark, facts.network) for mark in facts.training.compile_marks)))
    if not graphs:
        return NotApplicable(reason="no FP8 Linear of torchao is compiled")
    distributed = facts.training.distributed
    if distributed is None or distributed.wrapper != "DDP":
        return NotApplicable(reason="no DistributedDataParallel around the model")
    dynamo = facts.training.dynamo
    if dynamo.disabled or dynamo.stance == "force_eager":
        return NotApplicable(reason="Dynamo is switched off (CMP002)")
    if recorded(facts, "observed.steps_ms") and facts.observed.steps_ms:
        return None  # it ran
    split = {
        linear.name: linear
        for graph in graphs
        if mib(graph) > FIRST_BUCKET_MIB
        for linear in graph
        if linear.requires_grad and is_below_ddp(linear, distributed)
    }
    if not distributed.optimize_ddp or not split or (version := installed(facts)) >= MENDED:
        return None
    return Finding(
        title=f"DDP splits the graphs of {plural(len(split), 'FP8 Linear')}, and torchao {version} raises",
        explanation="The first step ends with \"BackendCompilerFailed: backend='compile_fn' raised: "
        "RuntimeError: val\", or with an AttributeError of 'op', which name neither FP8 nor DDP.",
        breaks="step_raises",
        evidence={"torchao": str(version), "fp8_linears": len(split), "first": next(iter(split))},
        treatment=Treatment(
            name="upgrade-torchao",
            summary="install the torchao that mends it, or let Dynamo not split graphs at DDP's buckets",
            code=f'pip install "torchao>={MENDED}"     # or torch._dynamo.config.optimize_ddp = False',
        ),
    )


def in_graph(mark: CompileMark, network: Network) -> list[Linear]:
    """List the FP8 layers that a mark compiles and does not run as they are."""
    return [
        linear
        for linear in network.linears
        if mark.backend != EAGER and is_below(linear, mark.name) and linear.compiled is not None
        if linear.stack == "torchao" and linear.kind.endswith(".Float8Linear")
    ]


def is_below_ddp(linear: Linear, distributed: Distributed) -> bool:
    """Whether DDP is around this layer too."""
    return is_below(linear, distributed.wrapper_at or "" if recorded(distributed, "wrapper_at") else "")


def mib(linears: list[Linear]) -> float:
    """Sum the weights that are trained, in MiB; training keeps them in 16 bits or in fp32. Frozen ones are in
    no bucket."""
    trained = (each for each in linears if each.requires_grad)
    return sum(each.parameters * (4 if each.dtype == "float32" else 2) for each in trained) / 2**20


def installed(facts: Facts) -> Version:
    """Read torchao's version. Raises `Unrecorded` for one that cannot be read, or that does not tell whether
    a build holds what mended it."""
    package = facts.software.packages.get("torchao")
    named = (package and package.version) or ""
    try:
        version = Version(named)
    except InvalidVersion:
        raise Unrecorded(Package, "version", "the version of torchao cannot be read") from None
    on_the_way = version.is_prerelease or "git" in (version.local or "")
    if on_the_way and version.release == MENDED.release:
        raise Unrecorded(Package, "version", f"whether torchao {version} holds what mended 0.13 is not known")
    return version


def _below_ddp(torchao: str) -> Facts:
    layer = Linear(
        name="up",
        kind="torchao.float8.float8_linear.Float8Linear",
        stack="torchao",
        use="training",
        weight_class=None,
        dtype="bfloat16",
        parameters=4096 * 4096,
        requires_grad=True,
        compiled="",
    )
    return Facts(
        software=Software(packages={"torchao": Package(version=torchao)}),
        network=Network(linears=(layer,)),
        training=Training(
            compile_marks=(CompileMark(name="", form="wrapped", backend="inductor"),),
            dynamo=Dynamo(disabled=False, suppress_errors=False, stance="default"),
            distributed=Distributed(world_size=8, wrapper="DDP", optimize_ddp=True),
        ),
    )


SICK = _below_ddp(torchao="0.12.0")
HEALTHY = _below_ddp(torchao="0.13.0")
