"""Try if FP8 works here: the import of Accelerate's backend, torchao's recipes.

Importing Transformer Engine or torchao changes a process, so a separate process with the same ``sys.path``
and environment tries it. A loaded module counts as tried.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from fp8doctor.facts import Linear
from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.recipes import TORCHAO, of_stack
from fp8doctor.stacks.torch_private import scaled_mm

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
    """Return the backend that Accelerate will use, named or the first installed.

    ``prepare`` takes a named one even without FP8 (accelerate 1.9 to 1.15).
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
    """Return the precision in Accelerate's state, or its variable."""
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


def _in_words(error: Exception) -> str:
    return (
        f"it took more than {TIME_LIMIT_S:g} s"
        if isinstance(error, subprocess.TimeoutExpired)
        else str(error)
    )


_log = logging.getLogger("fp8doctor")

SIDE = 64
"""Side of the tried matmul; ``_scaled_mm`` needs multiples of 16."""


def try_recipes(linears: Iterable[Linear]) -> dict[str, str | None]:
    """Map the model's torchao recipes to errors; empty before CUDA is initialized."""
    if not cuda_in_use() or scaled_mm() is None:
        return {}
    used = {
        each.recipe
        for each in linears
        if each.stack == TORCHAO.name and each.use == "training" and not each.features.get("emulate")
    }
    return {
        each.name: try_scaled_mm(each.granularity == "row", "cuda")
        for each in of_stack(TORCHAO.name)
        if each.tried and each.name in used
    }


def cuda_in_use() -> bool:
    """Tell if this process has initialized CUDA, not HIP."""
    import torch

    cuda: Any = torch.cuda
    return cuda.is_initialized() and not torch.version.hip


def try_scaled_mm(by_row: bool, device: str) -> str | None:
    """Return the first line of the error of torch's FP8 matmul, or None."""
    import torch

    product = scaled_mm()
    assert product is not None
    try:
        with torch.no_grad():
            left = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
            shapes = ((SIDE, 1), (1, SIDE)) if by_row else ((), ())
            scales = [torch.ones(shape, dtype=torch.float32, device=device) for shape in shapes]
            product(
                left, left.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
            ).float().sum().item()
    except Exception as error:
        _log.debug("an FP8 product failed", exc_info=True)
        return scrub(f"{type(error).__name__}: {error}".splitlines()[0])
    return None
