"""fp8doctor in transformers, TRL, Lightning, Accelerate and pytest.

Each module imports its framework, so none is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8doctor.integrations.accelerate import check
    from fp8doctor.integrations.transformers import FP8DoctorCallback

__all__ = ["FP8DoctorCallback", "check"]


def __getattr__(name: str) -> Any:
    homes = {"FP8DoctorCallback": "transformers", "check": "accelerate"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
