"""Try to save the smallest weight of each tensor subclass, in memory.

Ordinary Parameters save, and DTensors are gathered first.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
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
    smallest: dict[str, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters(tree):
        kind = subclass(parameter)
        if kind is None or kind.startswith(GATHERED) or local(parameter) is not parameter:
            continue
        if is_a(parameter, nn.UninitializedParameter):
            continue
        if kind not in smallest or stored_bytes(parameter) < stored_bytes(smallest[kind][1]):
            smallest[kind] = name, parameter
    found = []
    for kind, (name, weight) in smallest.items():
        reason = "has no data (meta device)" if weight.is_meta else ""
        if not reason and storage_bytes(weight) > MOST_BYTES:
            reason = "is too large to try"
        if reason:
            gaps["network.saving"] = f"the smallest {kind.rpartition('.')[2]} {reason}"
            return NOT_RECORDED
        found.append(
            SavedWeight(
                weight_class=kind,
                tried=name,
                pickle_error=error_of(lambda each: torch.save(each, io.BytesIO()), weight),
                storage_error=error_of(lambda each: each.untyped_storage().data_ptr(), weight),
            )
        )
    return tuple(found)


def error_of(save: Callable[[Tensor], object], weight: Tensor) -> str | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # a fake tensor warns that it has no storage
            save(weight.detach())
    except Exception as error:
        _log.debug("a weight cannot be saved", exc_info=True)
        return sentence(error)
    return None


def has_save_pretrained(tree: Tree) -> bool:
    return not {PRETRAINED, PEFT_MODEL}.isdisjoint(lineage(type(tree.root.module)))
