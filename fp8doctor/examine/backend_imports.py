"""Whether the FP8 backend that Accelerate will import can be imported, tried in a process of its own.

To import Transformer Engine or torchao changes a process, so the user's is left alone: what it has loaded
counts as tried, and a throw-away process with its ``sys.path`` and environment tries the rest.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

MODULES = {"AO": "torchao.float8", "TE": "transformer_engine.pytorch", "MSAMP": "msamp"}
"""Backend -> what Accelerate imports of it, in the order in which it takes the first that is installed when
none is named. Source: ``Accelerator.__init__`` and ``utils/`` of accelerate 1.4 to 1.15."""

TIME_LIMIT_S = 120.0
"""Seconds; importing torch and a backend takes 5 on an idle machine, a minute from a cold network disk."""

SAID = "fp8doctor: "
"""Begins the line in which the throw-away process answers; libraries print others."""

TRY = f"""
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[2])
try:
    import torch
    importlib.import_module(sys.argv[1])
    said = None
except BaseException as error:
    said = type(error).__name__ + ": " + " ".join(str(error).split())
print("\\n{SAID}" + json.dumps(said))
"""


def try_backends(variables: dict[str, str], gaps: dict[str, str]) -> dict[str, str | None]:
    """Map each backend to why it cannot be imported, or None; a try that did not end stands in ``gaps``."""
    backend = backend_to_come(variables)
    if backend is None:
        return {}
    try:
        return {
            backend: None
            if MODULES[backend] in sys.modules
            else try_import(MODULES[backend], tuple(sys.path))
        }
    except (OSError, subprocess.SubprocessError) as error:
        gaps["environment.backend_imports"] = scrub(
            f"trying to import {MODULES[backend]} did not end: {_in_words(error)}"
        )
    unknown: dict[str, str | None] = NOT_RECORDED
    return unknown


def backend_to_come(variables: dict[str, str]) -> str | None:
    """Read the backend of the FP8 that Accelerate was asked for: the named one, else the first that is
    installed.

    A name without FP8 counts as well: ``prepare`` takes it (accelerate 1.9 to 1.15).
    """
    if not _is_installed("accelerate"):
        return None
    named = variables.get("ACCELERATE_FP8_BACKEND", "NO")
    if named in MODULES:
        return named
    if named != "NO" or _precision(variables) != "fp8":
        return None
    return next(
        (backend for backend, module in MODULES.items() if _is_installed(module.partition(".")[0])), None
    )


def _precision(variables: dict[str, str]) -> str | None:
    """Tell what Accelerate's state says, or before there is one the variable."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    return (
        str(shared["_mixed_precision"])
        if "_mixed_precision" in shared
        else variables.get("ACCELERATE_MIXED_PRECISION")
    )


def _is_installed(package: str) -> bool:
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def try_import(module: str, path: tuple[str, ...]) -> str | None:
    """Say what importing a module raises in a fresh process, in one scrubbed line; None when it imports."""
    if not _is_installed(module.partition(".")[0]):
        return f"ModuleNotFoundError: No module named {module.partition('.')[0]!r}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", TRY, module, json.dumps(path)],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=TIME_LIMIT_S,
    )
    answers = [line.removeprefix(SAID) for line in done.stdout.splitlines() if line.startswith(SAID)]
    if not answers:
        return f"the process that imported it ended with code {done.returncode}"
    said = json.loads(answers[-1])
    return None if said is None else scrub(said)


def _in_words(error: Exception) -> str:
    return (
        f"it took more than {TIME_LIMIT_S:g} s"
        if isinstance(error, subprocess.TimeoutExpired)
        else str(error)
    )
