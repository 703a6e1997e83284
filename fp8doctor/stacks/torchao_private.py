"""Private names of torchao and torchtitan, with the verified versions of torchao."""

from __future__ import annotations

from typing import Any

from fp8doctor.stacks.looking import read

OP_CONFIGS = ("_float8_op_config", "_mxfp8_op_config")
"""Attributes of torchtitan's expert modules with their FP8 configuration."""

CONVERTER_HOME = "torchao.float8.float8_linear_utils"
"""Module of ``convert_to_float8_training`` (0.10 to 0.18)."""

CONVERTER_TRACE = "torchao.float8._inductor_patch"
"""Module that only the converter imports, when called (0.18)."""


def has_precomputed_scale(weight: Any) -> bool:
    """Tell if a weight for FSDP's float8 all-gather has its scale (0.10 to 0.18)."""
    return read(weight, "_precomputed_scale") is not None


def wrapped_tensor(weight: Any) -> Any:
    """Return the data inside a training weight's wrapper, or None (0.10 to 0.18)."""
    found = (getattr(weight, name, None) for name in ("_tensor", "_data"))
    return next((each for each in found if each is not None), None)
