"""larger-batch: twice the samples in a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8doctor.analysis.treatment_table import LARGER_BATCH, traits
from fp8doctor.stacks.held_tensors import tensors, with_tensors
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant

TIMES = int(traits(LARGER_BATCH).tokens_ratio)
"""How many times the batch is put together. A choice: the smallest that a user would try."""


def larger_batch(variant: Variant, context: TreatmentContext) -> Variant:
    """Repeat every tensor of the batch along its first dimension, where all of them have the same one."""
    sizes = {each.shape[0] for each in tensors(variant.batch) if each.ndim}
    if len(sizes) != 1:
        raise NotTried(
            "the tensors of the batch do not share their first dimension, so it cannot be repeated"
        )
    return replace(variant, batch=repeated(variant.batch))


def repeated(batch: Any) -> Any:
    """Put the tensors of the batch together with themselves; containers keep their kind."""
    return with_tensors(batch, lambda each: torch.cat([each] * TIMES) if each.ndim else each)
