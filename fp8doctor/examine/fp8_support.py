"""Try in a process of its own if Accelerate's backend imports.

Importing Transformer Engine or torchao changes a process. A loaded module counts as tried.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from typing import Any

from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED

MODULES = {"AO": "torchao.float8", "TE": "transformer_engine.pytorch", "MSAMP": "msamp"}
"""Backend -> module that Accelerate imports, in its order of preference. Source: ``Accelerator.__init__`` and
``utils/``, accelerate 1.4 to 1.15."""

TIME_LIMIT_S = 120.0
"""Seconds. Importing torch and a backend takes 5 s, or a minute from a cold network disk."""

SAID = "fp8doctor: "
"""Prefix of the answer, because libraries print other lines."""

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
    """Map each backend to its import error, or None; ``gaps`` has unfinished tries."""
    backend = backend_to_come(variables)
    if backend is None:
        return {}
    module = MODULES[backend]
    try:
        return {backend: None if module in sys.modules else try_import(module, tuple(sys.path))}
    except (OSError, subprocess.SubprocessError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        why = f"it took more than {TIME_LIMIT_S:g} s" if late else str(error)
        gaps["environment.backend_imports"] = scrub(f"trying to import {module} did not end: {why}")
    unknown: dict[str, str | None] = NOT_RECORDED
    return unknown


def backend_to_come(variables: dict[str, str]) -> str | None:
    """Return the backend that Accelerate will use, named or the first installed.

    ``prepare`` takes a named one even without FP8 (accelerate 1.9 to 1.15).
    """
    if not _is_installed("accelerate"):
        return None
    named = variables.get("ACCELERATE_FP8_BACKEND", "NO")
    if named in MODULES:
        return named
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    shared: dict[str, Any] = getattr(state, "_shared_state", {})
    precision = shared.get("_mixed_precision", variables.get("ACCELERATE_MIXED_PRECISION"))
    if named != "NO" or str(precision) != "fp8":
        return None
    installed = (each for each, module in MODULES.items() if _is_installed(module.partition(".")[0]))
    return next(installed, None)


def _is_installed(package: str) -> bool:
    return package in sys.modules or spec_of(package) is not None


def spec_of(package: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


@functools.cache
def try_import(module: str, path: tuple[str, ...]) -> str | None:
    """Return the error of an import in a new process, in a line, or None."""
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
