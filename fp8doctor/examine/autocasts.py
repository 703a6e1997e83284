"""Find autocasts that the user's code opens in the step: torch's, and TE's.

This decides if one is possible; `fp8doctor.trial.layers.rows` then watches a forward.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from fp8doctor.examine.checkpointing import TRANSFORMER_ENGINE
from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import LIBRARIES, named
from fp8doctor.stacks.looking import ancestor, forward_of, home, is_a
from fp8doctor.stacks.te_private import autocast_is_open

FP8_AUTOCAST, AUTOCAST_WITHIN = "training.fp8_autocast", "training.autocast_within"

LIGHTNING = ("lightning.", "pytorch_lightning.")
"""Lightning's packages: ``TransformerEnginePrecision`` opens the autocast around the step."""


def autocast_within(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Return True if a step was seen to open one, False if no code of the user's names one.

    Else ``NOT_RECORDED``.
    """
    if job.opens_autocast:
        return True
    own = {type(each): each for each in _modules(tree) if not home(type(each)).startswith(LIBRARIES)}
    functions = [(job.training_step, ()), *((forward_of(each), kind.__mro__) for kind, each in own.items())]
    found = (each for function, classes in functions for each in named(function, classes))
    if not any("autocast" in name or _is_autocast(value) for name, value in found):
        return False
    gaps[AUTOCAST_WITHIN] = "the step's code names an autocast, and no forward was seen"
    return NOT_RECORDED


def fp8_autocast(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Return if an FP8 autocast is open; None without Transformer Engine's layers.

    ``NOT_RECORDED`` if only a step shows it, with a gap if the step is unknown.
    """
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


def _modules(tree: Tree) -> list[Any]:
    return [module for place in tree.places for module in (*place.wrappers, place.module)]


def _is_autocast(value: Any) -> bool:
    return is_a(value, torch.autocast) or (is_a(value, type) and torch.autocast in value.__mro__)


def undecided(facts: Facts) -> bool:
    """Tell if only a forward shows this job's calls, or an autocast that its code does not name."""
    calls = any(
        each.form == "called_in_forward" and not recorded(each, "flag")
        for each in (facts.training.checkpointing if recorded(facts, "training.checkpointing") else ())
    )
    fp32 = facts.training.get("autocast", "unknown") is None and any(
        each.get("dtype") == "float32" and each.get("adapter") != "adapter" for each in facts.linears()
    )
    return calls or fp32 or not (recorded(facts, AUTOCAST_WITHIN) and recorded(facts, FP8_AUTOCAST))
