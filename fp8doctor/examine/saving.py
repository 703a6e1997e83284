"""Try to save the smallest weight of each tensor subclass, in memory.

Ordinary Parameters save, and DTensors are gathered first.
"""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.walk import Tree, parameters
from fp8doctor.facts import SavedWeight
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks.looking import is_a, lineage
from fp8doctor.stacks.tensors import local, storage_bytes, stored_bytes, subclass
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

MOST_BYTES = 32 * 2**20
"""Largest weight to try: 4096 x 4096 in BF16, copied and pickled in 20 ms."""

GATHERED = "torch.distributed."
"""Modules of FSDP's and DTensor's classes, which are removed before saving."""

PEFT_MODEL = ("peft.peft_model", "PeftModel")


def examine_saving(tree: Tree, gaps: dict[str, str]) -> Any:
    """Describe each tensor subclass; a gap if it has no weight to try."""
    kinds: dict[str, dict[int, tuple[str, nn.Parameter]]] = {}
    for name, parameter in parameters(tree):
        kind = subclass(parameter)
        if (
            kind is not None
            and not kind.startswith(GATHERED)
            and local(parameter) is parameter
            and not is_a(parameter, nn.UninitializedParameter)
        ):
            kinds.setdefault(kind, {}).setdefault(id(parameter), (name, parameter))
    found = []
    for kind, members in kinds.items():
        name, smallest = min(members.values(), key=lambda member: stored_bytes(member[1]))
        reason = (
            "has no data (meta device)"
            if smallest.is_meta
            else "is too large to try"
            if storage_bytes(smallest) > MOST_BYTES
            else None
        )
        if reason:
            gaps["network.saving"] = f"the smallest {kind.rpartition('.')[2]} {reason}"
            return NOT_RECORDED
        found.append(
            SavedWeight(
                weight_class=kind,
                tried=name,
                pickle_error=pickle_error(smallest),
                storage_error=storage_error(smallest),
            )
        )
    return tuple(found)


def pickle_error(weight: Tensor) -> str | None:
    try:
        torch.save(weight.detach(), io.BytesIO())
    except Exception as error:
        _log.debug("a weight cannot be pickled", exc_info=True)
        return sentence(error)
    return None


def storage_error(weight: Tensor) -> str | None:
    """Return the error of reading the storage, as safetensors 0.8 does, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):  # a fake tensor warns that it has none
            weight.detach().untyped_storage().data_ptr()
    except Exception as error:
        _log.debug("the storage of a weight cannot be told", exc_info=True)
        return sentence(error)
    return None


def has_save_pretrained(tree: Tree) -> bool:
    """Tell if the unwrapped root is a model of transformers or PEFT."""
    return not {PRETRAINED, PEFT_MODEL}.isdisjoint(lineage(type(tree.root.module)))
