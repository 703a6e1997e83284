"""fp8doctor in transformers, TRL, Lightning, Accelerate and pytest.

Each module imports its framework, so none is imported before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8doctor.integrations.accelerate import check
    from fp8doctor.integrations.transformers import FP8DoctorCallback

__all__ = ["FP8DoctorCallback", "check"]


def __getattr__(name: str) -> Any:
    if name == "FP8DoctorCallback":
        from fp8doctor.integrations.transformers import FP8DoctorCallback

        return FP8DoctorCallback
    if name == "check":
        from fp8doctor.integrations.accelerate import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
