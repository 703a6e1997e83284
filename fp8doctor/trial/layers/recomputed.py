"""The layers that a forward hands to a checkpoint function, seen while the forward runs.

While a checkpoint function runs what it was given, its frame is on the stack, reentrant or not. Of the module
calls below that frame the outermost is the region.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

import msgspec
from torch import nn

from fp8doctor.examine.checkpoint_calls import CHECKPOINT_MODULES
from fp8doctor.facts import Facts, Linear, recorded

Regions = dict[str, str | None]
"""Layer -> name of the checkpointed region that it ran in, None where it ran in none."""

FORWARDS = 2
"""Forwards that have to agree: which layers are recomputed may be drawn at random."""


def undecided(facts: Facts) -> bool:
    """Whether a forward of this job calls a checkpoint function and nobody saw for which layers."""
    return any(
        each.form == "called_in_forward" and each.active is not False
        for each in (facts.training.checkpointing if recorded(facts, "training.checkpointing") else ())
    ) and any(not recorded(each, "checkpointed") for each in facts.linears())


def regions(
    forward: Callable[[], object], layers: Mapping[str, nn.Module], model: nn.Module
) -> Regions | None:
    """Tell of each layer that runs in which region; None where two forwards do not agree."""
    seen = [_once(forward, layers, model) for _ in range(FORWARDS)]
    return seen[0] if all(each == seen[0] for each in seen) else None


def _once(forward: Callable[[], object], layers: Mapping[str, nn.Module], model: nn.Module) -> Regions:
    names = {id(module): name for name, module in model.named_modules()}
    found: Regions = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(_noting(name, found, names))
            hooks.callback(handle.remove)
        forward()
    return found


def _noting(name: str, found: Regions, names: Mapping[int, str]) -> Callable[..., None]:
    def note(layer: nn.Module, arguments: object) -> None:
        region = _region(sys._getframe(1), names)
        if found.get(name) is None:
            found[name] = name if region == "" else region

    return note


def _region(frame: FrameType | None, names: Mapping[int, str]) -> str | None:
    """Name the outermost module that is called below a checkpoint function; the empty name where a function
    is, None where no such function is on the stack."""
    outermost = ""
    while frame is not None:
        module: Any = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") in CHECKPOINT_MODULES:
            return outermost
        if frame.f_code is nn.Module._call_impl.__code__ and id(module) in names:
            outermost = names[id(module)]
        frame = frame.f_back
    return None


def with_regions(facts: Facts, found: Regions) -> Facts:
    """Add to the facts which layers a forward recomputes."""
    linears = tuple(_decided(each, found) for each in facts.network.linears)
    blocks = tuple(
        each
        if recorded(each, "checkpointed")
        else msgspec.structs.replace(each, checkpointed=_recomputed(each.name, linears))
        for each in facts.network.blocks
    )
    marks = tuple(
        msgspec.structs.replace(each, active=any(found.values()))
        if each.form == "called_in_forward" and each.active is None
        else each
        for each in facts.training.checkpointing
    )
    return msgspec.structs.replace(
        facts,
        network=msgspec.structs.replace(facts.network, linears=linears, blocks=blocks),
        training=msgspec.structs.replace(facts.training, checkpointing=marks),
    )


def _decided(linear: Linear, found: Regions) -> Linear:
    if recorded(linear, "checkpointed") or linear.name not in found:
        return linear
    return msgspec.structs.replace(linear, checkpointed=found[linear.name])


def _recomputed(blocks: str, linears: tuple[Linear, ...]) -> int:
    """Count the blocks of a list in which a layer is recomputed."""
    below = f"{blocks}." if blocks else ""
    return len(
        {
            each.name.removeprefix(below).partition(".")[0]
            for each in linears
            if each.name.startswith(below)
            and recorded(each, "checkpointed")
            and each.checkpointed is not None
        }
    )
