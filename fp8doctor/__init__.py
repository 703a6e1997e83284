"""Diagnose why FP8 training is slower than BF16 on your GPU and model.

Use ``from fp8doctor import inspect_model`` in Python, or ``fp8doctor model.py`` on the command line.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8doctor.api import inspect_model
    from fp8doctor.planned import Plan, plan
    from fp8doctor.report import Report, compare, load_health, load_report

__all__ = ["Plan", "Report", "compare", "inspect_model", "load_health", "load_report", "plan"]

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "checks")):
    # In a checkout or an editable install, checks/ is next to the package; otherwise it ships inside it.
    __path__.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def __getattr__(name: str) -> Any:
    homes = {"inspect_model": "api", "Plan": "planned", "plan": "planned", "Report": "report"}
    homes |= dict.fromkeys(("load_report", "compare", "load_health"), "report")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fp8doctor.{homes[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
