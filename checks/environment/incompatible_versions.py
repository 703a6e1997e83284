"""A release that does not work with FP8 in this job

An installed release, alone or with another one, is known to fail or to train this kind of job incorrectly.
Most pairs fail with a message that names neither version. Others say nothing. Accelerate 1.4 to 1.7 report
fp8 and convert no layer. Transformer Engine 2.0 to 2.3 lose delayed scaling's new scales if `te.checkpoint`
recomputes a layer. The loss may fall for thousands of steps and then diverge. torchao 0.12 and older raises
if DDP splits its compiled graph.

    pip install "transformer-engine[pytorch]==2.3"   # before: te.checkpoint over delayed scaling

    pip install --upgrade --no-build-isolation "transformer-engine[pytorch]>=2.4,<2.20"   # after

`transformer-engine` alone holds no code: `[pytorch]` updates its torch extension too. 2.20 needs cuDNN 9.12.
The table is `training_bugs.toml`. If the effect depends on settings that fp8doctor cannot see, this is a
warning. Ignore it if your loss curve matches BF16's, or your build has the fix.
https://github.com/NVIDIA/TransformerEngine/pull/1723
https://github.com/huggingface/accelerate/pull/3677
https://github.com/pytorch/ao/issues/2586
"""

from fp8doctor import kit

GRAVEST = ("error", "warning", "info")

SEVERITY: dict[str, kit.Severity] = {"later": "info", "fails": "warning"}
"""Kind of a bug -> severity; the other kinds are errors."""

BREAKS: dict[str, kit.Breaks] = {"incorrect": "layers_do_not_learn", "raises": "step_raises"}


@kit.check(
    "ENV005",
    "incompatible-versions",
    severity="error",
    was=("NUM004", "CMP008"),
    explained_by=("fp8-request-overridden", "fp8-backend-missing", "GPU002"),
    changes_fp8=True,
)
def incompatible_versions(facts: kit.Facts) -> kit.Finding | None:
    found = sorted(kit.training_bugs.bugs_of(facts), key=lambda each: GRAVEST.index(severity_of(each[0])))
    if not found:
        return None
    (bug, layers), more = found[0], len(found) - 1
    release, count = bug.release(facts), kit.plural(len(layers), "FP8 layer")
    said = {
        "incorrect": f"{release} {'trains' if bug.certain else 'may train'} {count} incorrectly",
        "raises": f"{release} raises with {count}",
    }.get(bug.kind, f"{release} does not work with FP8 here")
    lines = dict.fromkeys(each.written(facts) for each, _ in found)
    return kit.Finding(
        severity=severity_of(bug),
        title=f"{said}: {bug.name}{kit.named(layers, len(facts.network.fp8)) if layers else ''}"
        + f"; and {more} more" * (more > 0),
        explanation=" ".join(each.effect for each, _ in found) + f" Source: {bug.sources[0]}.",
        evidence={"release": release, "bugs": tuple(each.name for each, _ in found), "layers": len(layers)},
        treatment=kit.Treatment(
            name="release-that-works", summary="use a release or a setting that works", code="\n".join(lines)
        ),
        breaks=BREAKS.get(bug.kind, kit.NOT_RECORDED) if bug.certain else kit.NOT_RECORDED,
    )


def severity_of(bug: kit.training_bugs.TrainingBug) -> kit.Severity:
    """A bug that depends on settings which the facts do not show is at most a warning."""
    severity = SEVERITY.get(bug.kind, "error")
    return severity if bug.certain or severity == "info" else "warning"


def _job(te: str, torchao: str, accelerate: str) -> kit.Facts:
    checkpoint = kit.Checkpointing(name="layers.0", form="wrapper", active=True, library="transformer_engine")
    layer = kit.float8("layers.0.up", stack="transformer_engine", recipe="delayed", checkpointed="layers.0")
    return kit.example(
        packages={"accelerate": accelerate, "transformer_engine": te, "torchao": torchao},
        variables={"ACCELERATE_MIXED_PRECISION": "fp8"},
        backend_imports={"AO": None},
        linears=(layer, kit.float8(compiled="")),
        checkpointing=(checkpoint,),
        compile_marks=(kit.CompileMark(name="", form="wrapped", backend="inductor"),),
        dynamo=kit.facts.Dynamo(disabled=False),
        distributed=kit.facts.Distributed(world_size=8, wrapper="DDP", optimize_ddp=True),
        accelerate=None,
        adapter_parameters=0,
    )


FIRES = _job("2.3.0", "0.12.0", "1.8.1")
SILENT = _job("2.4.0", "0.13.0", "1.9.0")
