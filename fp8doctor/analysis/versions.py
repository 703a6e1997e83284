"""Versions of installed packages."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from fp8doctor.facts import Facts, recorded

OP_CONFIGS_SINCE = Version("0.17.0")
"""First torchao with ``Float8TrainingOpConfig`` and ``MXFP8TrainingOpConfig``, without ``MoETrainingConfig``
and ``MXLinearConfig``. Source: ``prototype/moe_training`` and ``prototype/mx_formats`` of 0.12 to 0.17."""


def installed(facts: Facts, package: str) -> Version | None:
    """Read the version of a package; None where it is missing or says none."""
    if not recorded(facts, "software.packages") or package not in facts.software.packages:
        return None
    try:
        return Version(facts.software.packages[package].version or "")
    except InvalidVersion:
        return None


def has_op_configs(facts: Facts) -> bool:
    """Whether this torchao, or the one that is installed next, converts by configurations of operations."""
    version = installed(facts, "torchao")
    return version is None or version >= OP_CONFIGS_SINCE
