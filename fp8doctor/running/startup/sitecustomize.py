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

HERE = os.path.dirname(os.path.abspath(__file__))


def _attach(request: str) -> None:
    """Restore the environment, and load the fp8doctor that was started, wherever it is."""
    asked = json.loads(request)
    if asked["python_path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = asked["python_path"]
    if HERE in sys.path:
        sys.path.remove(HERE)
    sys.path_importer_cache.pop(HERE, None)
    home = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
    sys.path.insert(0, home)
    try:
        from fp8doctor.running.attached import attach
    finally:
        sys.path.remove(home)
    attach(asked, BEFORE)


def _import_next() -> None:
    """Import the ``sitecustomize`` that this one hides."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "FP8DOCTOR_RUN" in os.environ:
    _attach(os.environ.pop("FP8DOCTOR_RUN"))
    _import_next()
