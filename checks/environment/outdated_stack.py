"""A newer Transformer Engine needs less host time

What it finds. This job imports a Transformer Engine whose newer releases spend less host time per
layer.

Why it matters. FP8 runs more and shorter kernels than BF16, and a te.Linear takes the host several
times as long as an nn.Linear. So the host limits an FP8 step sooner than a BF16 step. Releases
2.10, 2.12, 2.14 and 2.16 each reduced that host time.

Fix. Upgrade, then time the step again. Versions 2.20 and newer refuse a cuDNN before 9.12, and
torch 2.8 to 2.10 bring 9.10. If your cuDNN is newer, omit the upper bound.

    # before
    pip install "transformer-engine[pytorch]==2.8.0"

    # after
    pip install --upgrade --no-build-isolation "transformer-engine[pytorch]>=2.17,<2.20"

When to ignore it. If the GPU is busy all the time: less host time then saves nothing.

How it is detected, and limits. fp8doctor compares the imported version with the releases that
brought each change. It does not know in advance how much an upgrade saves; this depends on how far
the host falls behind the GPU.

References. The first release whose tag holds each change:
https://github.com/NVIDIA/TransformerEngine/pull/2377
https://github.com/NVIDIA/TransformerEngine/pull/2439
https://github.com/NVIDIA/TransformerEngine/pull/2559
https://github.com/NVIDIA/TransformerEngine/pull/2957
"""

from __future__ import annotations

from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from fp8doctor.analysis.versions import transformer_engine_line
from fp8doctor.facts import Facts, Package, Software, recorded
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check


class Since(NamedTuple):
    """What a version brought."""

    package: str
    version: str
    brings: str


NEWS = (
    Since("transformer_engine", "2.10", "less Python work in its modules' forward (TE#2377, TE#2400)"),
    Since("transformer_engine", "2.12", "even less, in forward and attribute access (TE#2439)"),
    Since("transformer_engine", "2.14", "cheaper quantized tensors (TE#2559)"),
    Since("transformer_engine", "2.16", "a cheaper autocast (TE#2957)"),
)
"""The first release that holds each change. Sources: the pull requests, and the tags that contain them."""


@check("ENV007", "outdated-stack", area="environment", severity="info")
def outdated_stack(facts: Facts) -> Finding | NotApplicable | None:
    used = {
        news.package
        for news in NEWS
        if news.package in facts.software.packages and facts.software.packages[news.package].imported is True
    }
    if not used:
        return NotApplicable(reason="Transformer Engine is not imported")
    missed = [
        news
        for news in NEWS
        if news.package in used and is_older(facts.software.packages[news.package], news.version)
    ]
    if not missed:
        return None
    newest = {news.package: news.version for news in missed}
    named = ", ".join(f"{package} {facts.software.packages[package].version}" for package in newest)
    return Finding(
        title=f"{named} is outdated: newer versions need less host time",
        explanation=" ".join(f"{news.version} brought {news.brings}." for news in missed)
        + " This saves time if the host limits the step.",
        evidence={"installed": named, "missed": tuple(news.version for news in missed)},
        treatment=Treatment(
            name="upgrade-" + "-and-".join(package.replace("_", "-") for package in newest),
            summary="upgrade, and time the step again",
            code=transformer_engine_line(facts),
            kind="shell",
        ),
    )


def is_older(package: Package, version: str) -> bool:
    """Whether the installed version is older. One that cannot be read is not."""
    try:
        return (
            recorded(package, "version")
            and package.version is not None
            and Version(package.version) < Version(version)
        )
    except InvalidVersion:
        return False


def _imported(version: str) -> Facts:
    return Facts(software=Software(packages={"transformer_engine": Package(version=version, imported=True)}))


SICK = _imported("2.8.0")
HEALTHY = _imported("2.20.2")
