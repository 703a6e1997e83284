"""A newer Transformer Engine needs less host time

What it finds. This job imports a Transformer Engine whose newer releases spend less host time per layer.

Why it matters. FP8 runs more and shorter kernels than BF16, and a te.Linear takes the host several times as
long as an nn.Linear. So the host limits an FP8 step sooner than a BF16 step. Releases 2.10, 2.12, 2.14 and
2.16 each reduced that host time.

Fix. Upgrade, then time the step again. Versions 2.20 and newer refuse a cuDNN before 9.12, and torch 2.8 to
2.10 bring 9.10. If your cuDNN is newer, omit the upper bound.

    # before
    pip install "transformer-engine[pytorch]==2.8.0"

    # after
    pip install --upgrade --no-build-isolation "transformer-engine[pytorch]>=2.17,<2.20"

When to ignore it. If the GPU is busy all the time: less host time then saves nothing.

How it is detected, and limits. fp8doctor compares the imported version with the releases that brought each
change. It does not know how much an upgrade saves.

References. The first release whose tag holds each change:
https://github.com/NVIDIA/TransformerEngine/pull/2377 https://github.com/NVIDIA/TransformerEngine/pull/2439
https://github.com/NVIDIA/TransformerEngine/pull/2559 https://github.com/NVIDIA/TransformerEngine/pull/2957
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.recipe_support import installed, transformer_engine_line
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

STACK = "transformer_engine"

NEWS = {
    "2.10": "less Python work in its modules' forward (TE#2377, TE#2400)",
    "2.12": "even less, in forward and attribute access (TE#2439)",
    "2.14": "cheaper quantized tensors (TE#2559)",
    "2.16": "a cheaper autocast (TE#2957)",
}
"""The first release that holds each change. Sources: the pull requests, and the tags that contain them."""


@check("ENV007", "outdated-stack", area="environment", severity="info")
def outdated_stack(facts: Facts) -> Finding | NotApplicable | None:
    packages = facts.software.packages
    if STACK not in packages or packages[STACK].imported is not True:
        return NotApplicable(reason="Transformer Engine is not imported")
    version = installed(facts, STACK)
    missed = [since for since in NEWS if version is not None and version < Version(since)]
    if not missed:
        return None
    return Finding(
        title=f"{STACK} {version} is outdated: newer versions need less host time",
        explanation=" ".join(f"{since} brought {NEWS[since]}." for since in missed)
        + " This saves time if the host limits the step.",
        evidence={"installed": f"{STACK} {version}", "missed": tuple(missed)},
        treatment=Treatment(
            name="upgrade-transformer-engine",
            summary="upgrade, and time the step again",
            code=transformer_engine_line(facts),
            kind="shell",
        ),
    )


SICK = example(packages={"transformer_engine": "2.8.0"})
HEALTHY = example(packages={"transformer_engine": "2.20.2"})
