"""Code snippets of treatments: their kind, and their imports."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

SnippetKind = Literal["python", "shell", "sketch", "yaml"]

OF_THE_SCRIPT = frozenset({"model", "torch", "optimizer", "batch", "tokenizer", "accelerator"})
"""Conventional names of a training script; snippets need not define them."""

IMPORTS = {
    "torchao.float8": (
        "Float8LinearConfig",
        "convert_to_float8_training",
        "precompute_float8_dynamic_scale_for_fsdp",
    ),
    "torchao.prototype.moe_training.config": (
        "Float8TrainingOpConfig",
        "MXFP8TrainingOpConfig",
        "MXFP8TrainingRecipe",
    ),
    "torchao.quantization": ("quantize_",),
    "transformer_engine.common.recipe": (
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
    ),
    "accelerate": ("Accelerator",),
    "accelerate.utils": ("AORecipeKwargs", "TERecipeKwargs"),
    "accelerate.utils.transformer_engine": ("convert_model",),
    "peft": ("LoraConfig", "get_peft_model"),
    "transformers": (
        "AutoModelForCausalLM",
        "DataCollatorWithPadding",
        "FineGrainedFP8Config",
        "Trainer",
        "TrainingArguments",
    ),
    "trl": ("SFTConfig",),
    "unsloth": ("FastLanguageModel",),
    "torch": ("nn",),
    "torch.utils.checkpoint": ("checkpoint",),
    "torch.utils.data": ("DataLoader", "DistributedSampler"),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "CheckpointWrapper",
        "checkpoint_wrapper",
    ),
    "fp8doctor": ("inspect_model",),
}
"""Module -> names that snippets may use and that are imported from it."""

MODULES = {
    "te": "import transformer_engine.pytorch as te",
    "functools": "import functools",
    "math": "import math",
    "os": "import os",
}
"""Name of a module -> the line that imports it."""

COMMANDS = (
    "#",
    "export ",
    "unset ",
    "pip ",
    "fp8doctor ",
    "nvidia-smi",
    "accelerate ",
    "conda ",
    "uv ",
    "top ",
)
"""First words of shell commands."""

SETS = re.compile(r"[A-Z][A-Z0-9_]*=")
"""A word that sets a variable for the shell command after it."""


def with_imports(code: str) -> str:
    """Add an import for every known name that is used but not defined.

    Returns snippets that are not Python unchanged.
    """
    python = _python(code)
    missing = python.free_names if python else frozenset()
    lines = [line for name, line in MODULES.items() if name in missing]
    for module, names in IMPORTS.items():
        if used := sorted(missing.intersection(names)):
            lines.append(f"from {module} import {', '.join(used)}")
    return "\n".join([*lines, code])


class Python(NamedTuple):
    """Properties of a Python snippet."""

    free_names: frozenset[str]
    """Names that are used before they are defined."""
    is_whole: bool
    """True if it changes something of the script and omits no code (ellipsis)."""


@functools.lru_cache(maxsize=512)
def _python(code: str) -> Python | None:
    """Parse a snippet; None if it is not Python. Cached."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    left_out = any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree))
    changes = not all(map(binds_own_names, tree.body))
    return Python(frozenset(free_names(tree)), changes and not left_out)


def binds_own_names(statement: ast.stmt) -> bool:
    """Check whether a statement only assigns names that are not the script's."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return True
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [statement.target]
        if isinstance(statement, ast.AugAssign)
        else [None]
    )
    return all(isinstance(each, ast.Name) and each.id not in OF_THE_SCRIPT for each in targets)


def settings(line: str) -> dict[str, str | None]:
    """Read the variables that a shell line sets (value) or unsets (None)."""
    words = line.partition("#")[0].split()
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command == "unset":
        return dict.fromkeys(rest)
    pairs = [each.partition("=") for each in rest] if command == "export" else []
    if SETS.match(command):
        pairs = [each.partition("=") for each in itertools.takewhile(SETS.match, words)]
    return {name: value for name, mark, value in pairs if mark}


def kind_of(code: str) -> SnippetKind:
    """Classify a snippet: Python that runs in a training script, shell, or a sketch."""
    if all(line.startswith(COMMANDS) for line in code.splitlines()) and not all(
        line.startswith("#") for line in code.splitlines()
    ):
        return "shell"
    python = _python(code)
    runs = python is not None and python.is_whole and not python.free_names - OF_THE_SCRIPT
    return "python" if runs else "sketch"


def free_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that are used before they are defined."""
    bound = set(dir(builtins))
    for statement in tree.body:
        targets: set[ast.AST] = (
            {node for target in statement.targets for node in ast.walk(target)}
            if isinstance(statement, ast.Assign)
            else set()
        )
        inside: set[str] = set()
        later: set[str] = set()
        used: set[str] = set()
        for node in ast.walk(statement):
            if isinstance(node, ast.arg):
                inside.add(node.arg)
            elif isinstance(node, ast.alias):
                inside.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.Name):
                kind = used if isinstance(node.ctx, ast.Load) else later if node in targets else inside
                kind.add(node.id)
        yield from used - bound - inside
        bound |= inside | later
