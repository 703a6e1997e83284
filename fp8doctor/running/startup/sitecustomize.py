"""Attach fp8doctor to a script before it runs, and leave no trace.

Restores variables and ``sys.path``, imports the ``sitecustomize`` that this one hides, and waits for torch.
"""

import sys

BEFORE = frozenset(sys.modules)
"""Modules that Python itself imports."""

import importlib.machinery  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any  # noqa: E402


def _begin() -> dict[str, Any]:
    """Read the request from the environment, and restore the environment."""
    request: dict[str, Any] = json.loads(os.environ.pop("FP8DOCTOR_RUN"))
    if request["python_path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = request["python_path"]
    here = os.path.dirname(os.path.abspath(__file__))
    if here in sys.path:
        sys.path.remove(here)
    sys.path_importer_cache.pop(here, None)
    return request


def _watch(request: dict[str, Any]) -> None:
    """Load the fp8doctor that was started, wherever it is, and wait for torch."""
    sys.path.insert(0, request["home"])
    try:
        from fp8doctor.running.attached import attach
    finally:
        sys.path.remove(request["home"])
    attach(request, BEFORE)


def _next() -> None:
    """Import the ``sitecustomize`` that this one hides."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "FP8DOCTOR_RUN" in os.environ:
    _watch(_begin())
    _next()
