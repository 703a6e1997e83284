"""A release that trains this job incorrectly

What it finds. An installed release is known to compute this kind of job incorrectly, without an error.

Why it matters. Nothing raises, and the loss may fall for thousands of steps. Then it diverges, becomes NaN,
or ends higher than in BF16. Examples: Transformer Engine 2.0 to 2.3 lose delayed scaling's new scales if
`te.checkpoint` recomputes a layer. Versions 1.9 to 2.6 never update the scales of gradients if the first
`te.ops` layer is frozen. Optimizers of torch round weights that exist in FP8 only, and lose small updates.

Fix. Install the release that fixes it, or leave the combination out.

    pip install "transformer_engine==2.3"   # before: te.checkpoint over delayed scaling

    pip install "transformer_engine>=2.4"   # after

When to ignore it. If your loss curve matches BF16's, or your build contains the fix.

How it is detected, and limits. A table names structures of jobs, the releases that compute them incorrectly,
and the release that fixes each. fp8doctor compares it with the installed versions and the layers. If the
effect depends on settings that it cannot see, the finding is a warning. Other bugs are not found. The recipe
of Transformer Engine's layers is known only after a forward in FP8.

References. The table names the thread or the code of each:
https://github.com/NVIDIA/TransformerEngine/issues/1190 https://github.com/NVIDIA/TransformerEngine/pull/1723
https://github.com/NVIDIA/TransformerEngine/pull/2063 https://github.com/NVIDIA/Megatron-LM/issues/2272
https://github.com/triton-lang/triton/issues/11111
"""

from __future__ import annotations

from fp8doctor.analysis.layers import named
from fp8doctor.analysis.training_bugs import bugs_of
from fp8doctor.facts import NOT_RECORDED, Checkpointing, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural


@check(
    "NUM004",
    "trains-incorrectly",
    area="numerics",
    severity="error",
    changes_fp8=True,
    explained_by=("GPU001", "GPU002"),
)
def trains_incorrectly(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = facts.network.fp8
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    found = bugs_of(facts)
    if not found:
        return None
    bug, layers = found[0]
    release = bug.release(facts)
    return Finding(
        severity=None if bug.certain else "warning",
        title=f"{release} {'trains' if bug.certain else 'may train'} {plural(len(layers), 'FP8 layer')} "
        f"incorrectly: {bug.name}{named(layers, len(fp8))}",
        explanation=" ".join(each.effect for each, _ in found) + f" Source: {bug.sources[0]}.",
        evidence={
            "release": release,
            "bugs": tuple(each.name for each, _ in found),
            "layers": len(layers),
            "first": layers[0].name,
        },
        treatment=Treatment(
            name="release-that-trains",
            summary="use a release or a setting that trains correctly",
            code="\n".join(dict.fromkeys(each.lines.strip() for each, _ in found)),
        ),
        breaks="layers_do_not_learn" if bug.certain else NOT_RECORDED,
    )


def _checkpointed(release: str) -> Facts:
    layer = float8("layers.0.up", stack="transformer_engine", recipe="delayed", checkpointed="layers.0")
    region = Checkpointing(name="layers.0", form="wrapper", active=True, library="transformer_engine")
    return example(packages={"transformer_engine": release}, linears=(layer,), checkpointing=(region,))


FIRES = _checkpointed("2.3.0")
SILENT = _checkpointed("2.4.0")
