"""Versions of installed packages."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from fp8doctor.facts import Facts, recorded

OP_CONFIGS_SINCE = Version("0.17.0")
"""First torchao with ``Float8TrainingOpConfig`` and ``MXFP8TrainingOpConfig``, without ``MoETrainingConfig``
and ``MXLinearConfig``. Source: ``prototype/moe_training`` and ``prototype/mx_formats`` of 0.12 to 0.17."""

READS_BACKEND_SINCE = Version("1.9.0")
"""First accelerate whose ``Accelerator`` and ``prepare`` read ACCELERATE_FP8_BACKEND."""

TE_WITH_CUDNN_FLOOR, CUDNN_FLOOR = Version("2.20"), Version("9.12")
"""First Transformer Engine that refuses an older cuDNN at import, and the first cuDNN that it takes. torch
2.8 to 2.10 pin 9.10.2.21. Source: ``transformer_engine/common/__init__.py`` of 2.19.0 and 2.20.2."""

TE_BESIDE_ANY_CUBLAS = Version("2.17")
"""First Transformer Engine after those that miss a symbol in the cuBLAS of torch 2.11 (2.13.0 to 2.16.1).
Source: symbols read in the released libraries."""


def transformer_engine_line(facts: Facts) -> str:
    """Write the pip line for the newest Transformer Engine that this cuDNN can load."""
    cudnn = cudnn_version(facts)
    newest = cudnn is not None and cudnn >= CUDNN_FLOOR
    bounds = f">={TE_BESIDE_ANY_CUBLAS}" if newest else f">={TE_BESIDE_ANY_CUBLAS},<{TE_WITH_CUDNN_FLOOR}"
    why = "" if newest else f"   # {TE_WITH_CUDNN_FLOOR} and newer need cuDNN {CUDNN_FLOOR}"
    return f'pip install --upgrade --no-build-isolation "transformer-engine[pytorch]{bounds}"{why}'


def parsed(version: str | None) -> Version | None:
    """Parse a version; None for one that is missing or no version."""
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


def cudnn_version(facts: Facts) -> Version | None:
    """Read the version of pip's cuDNN; None if it is missing or was not recorded."""
    return parsed(facts.software.cudnn) if recorded(facts, "software.cudnn") else None


def installed(facts: Facts, package: str) -> Version | None:
    """Read the version of a package; None if it is missing or says none."""
    found = facts.packages().get(package)
    return parsed(found.get("version")) if found is not None else None


def at_least(facts: Facts, package: str, version: Version) -> bool:
    """Return whether a package is in this version or newer; an unknown version counts as new."""
    return package in facts.software.packages and (installed(facts, package) or version) >= version


def has_op_configs(facts: Facts) -> bool:
    """Return whether this torchao, else the next one installed, converts by op configs."""
    version = installed(facts, "torchao")
    return version is None or version >= OP_CONFIGS_SINCE
