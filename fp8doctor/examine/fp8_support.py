"""Try in a process of its own if Accelerate's backend imports; find arguments of a script that ask for FP8.

Importing Transformer Engine or torchao changes a process. A loaded module counts as tried.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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


SWITCH = re.compile(
    r"(no-)?((?:use-|enable-|with-)?(?:fp8|float8)(?:-training|-linear|-format|-recipe-name)?)"
)
"""Options that enable FP8 training, alone or with a value (Megatron's ``--fp8-format hybrid``)."""

PRECISION = re.compile(r"(?:(?:mixed|train|training|compute)-)?precision|converters")
"""Options that take a precision; ``dtype`` may be a checkpoint's or a KV cache's."""

FP8_WORDS = frozenset(
    """
    fp8 float8 e4m3 hybrid mxfp8 tensorwise rowwise blockwise delayed fp8-hybrid fp8-delayed ao-fp8
    transformer-engine true
    """.split()
)
"""Values that are kept; another word is a file or another argument."""

NO = frozenset((*"false 0 no off n f none null bf16 fp16 fp32".split(), ""))
"""Values of a switch that do not ask for FP8."""

ASSIGNMENT = re.compile(r"^(?P<dashes>-{0,2})(?P<name>[A-Za-z][\w.\-]*)(?:=(?P<value>.*))?$", re.DOTALL)


def fp8_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return arguments that ask for FP8, as listed; a name's last one counts."""
    found: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        match = ASSIGNMENT.match(argument)
        if match is None or not (match["dashes"] or match["value"] is not None):
            continue
        name = match["name"].rpartition(".")[2].lower().replace("_", "-")
        value = match["value"]
        if value is None and following and not following.startswith("-"):
            value = following
        word = None if value is None else value.strip("\"'").lower().replace("_", "-")
        switch = SWITCH.fullmatch(name)
        if switch is None and not PRECISION.fullmatch(name):
            continue
        key = switch[2] if switch else name
        found.pop(key, None)
        if (word in FP8_WORDS and word != "true") if switch is None else (not switch[1] and word not in NO):
            found[key] = f"{match['dashes']}{name}{f' {word}' if word in FP8_WORDS else ''}"
    return tuple(found.values())
