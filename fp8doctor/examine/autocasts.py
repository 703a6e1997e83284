"""Autocasts that the user's own code opens inside the step: torch's, and Transformer Engine's for FP8.

Examining finds out whether one is possible. If so, a forward on fake tensors sees whether it is opened
(`fp8doctor.trial.layers.seen_calls`).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from fp8doctor.examine.checkpointing import TRANSFORMER_ENGINE
from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import LIBRARIES, named
from fp8doctor.stacks.looking import ancestor, forward_of, home, is_a, state_of
from fp8doctor.stacks.te_private import autocast_is_open

FP8_AUTOCAST, AUTOCAST_WITHIN = "training.fp8_autocast", "training.autocast_within"

WITHOUT_FP8_AUTOCAST = frozenset(
    ("fp8doctor", "torch", "torchao", "transformer_engine", "transformer_engine_torch", "triton", "numpy")
)
"""Packages that open Transformer Engine's autocast for nobody by themselves."""

INSTALLED = re.compile(rf"[/\\](site|dist)-packages[/\\]|^{re.escape(os.path.dirname(os.__file__))}")
"""Files of installed packages and of Python itself."""

LIGHTNING = ("lightning.", "pytorch_lightning.")
"""The two packages of Lightning, whose plugin ``TransformerEnginePrecision`` opens it around the step."""


def autocast_within(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Tell that no code of the user's names an autocast; ``NOT_RECORDED`` if some does."""
    own = {type(each): each for each in _modules(tree) if not home(type(each)).startswith(LIBRARIES)}
    functions = [(job.training_step, ()), *((forward_of(each), kind.__mro__) for kind, each in own.items())]
    found = (each for function, classes in functions for each in named(function, classes))
    if not any("autocast" in name or _is_autocast(value) for name, value in found):
        return False
    gaps[AUTOCAST_WITHIN] = "the step's code names an autocast, and no forward was seen"
    return NOT_RECORDED


def fp8_autocast(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Tell that an FP8 autocast is open now, or None without layers of Transformer Engine; ``NOT_RECORDED``
    if only a step tells, with the reason if this step is not known."""
    if not any(home(type(each)).startswith(f"{TRANSFORMER_ENGINE}.") for each in _modules(tree)):
        return None
    if job.around is not nullcontext or autocast_is_open():
        return True
    if job.training_step is None:
        gaps[FP8_AUTOCAST] = "who trains this model, inside te.autocast or not, is told by no training_step"
    elif any(ancestor(type(tree.root.module), each, ("LightningModule",)) for each in LIGHTNING):
        gaps[FP8_AUTOCAST] = (
            "a Trainer of Lightning opens te.autocast around the step where its precision says so"
        )
    return NOT_RECORDED


def nobody_names_fp8_autocast(loaded: Mapping[str, Any]) -> bool:
    """Whether no code of the process names Transformer Engine's autocast, by the text of its modules.

    ``loaded`` is ``sys.modules``. False if code cannot be read, or imports a module that is not loaded yet.
    """
    for name, module in tuple(loaded.items()):
        if name.partition(".")[0] in WITHOUT_FP8_AUTOCAST or module is None:
            continue
        file = state_of(module).get("__file__")
        if file is None and name == "__main__" and any(map(_is_of_main, state_of(module).values())):
            return False  # a notebook
        if isinstance(file, str) and file.endswith(".py") and not _is_silent(file, loaded):
            return False
    return True


def _is_of_main(value: Any) -> bool:
    return type(value) in (FunctionType, type) and value.__module__ == "__main__"


def _is_silent(file: str, loaded: Mapping[str, Any]) -> bool:
    """Whether a file names no FP8 autocast; a library's may, if it does not name Transformer Engine."""
    try:
        text = Path(file).read_bytes()
        if INSTALLED.search(file):
            return b"autocast" not in text or TRANSFORMER_ENGINE.encode() not in text
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return False
    if b"fp8_autocast" in text or re.search(rb"(?<!torch\.)(?<!amp\.)\bautocast\b", text):
        return False
    asked = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    names = [
        alias.name if isinstance(each, ast.Import) else each.module or ""
        for each in asked
        for alias in each.names
        if isinstance(each, ast.Import) or not each.level
    ]
    return all(not name or name in loaded for name in names)


def _modules(tree: Tree) -> list[Any]:
    return [module for place in tree.places for module in (*place.wrappers, place.module)]


def _is_autocast(value: Any) -> bool:
    return is_a(value, torch.autocast) or (is_a(value, type) and torch.autocast in value.__mro__)


def undecided(facts: Facts) -> bool:
    """Whether only a forward tells what this job calls."""
    calls = any(
        each.form == "called_in_forward" and each.active is None
        for each in (facts.training.checkpointing if recorded(facts, "training.checkpointing") else ())
    )
    return calls or not (recorded(facts, AUTOCAST_WITHIN) and recorded(facts, FP8_AUTOCAST))
