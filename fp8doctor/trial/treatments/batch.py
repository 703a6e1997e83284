"""larger-batch: twice the samples in a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fp8doctor.analysis.treatment_table import LARGER_BATCH
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext, carries_out
from fp8doctor.trial.variant import Variant

TIMES = 2
"""How many times the batch is put together. A choice: the smallest that a user would try."""


@carries_out(LARGER_BATCH, changes="the batch", tokens_ratio=float(TIMES))
def larger_batch(variant: Variant, context: TreatmentContext) -> Variant:
    """Repeat every tensor of the batch along its first dimension, where all of them have the same one."""
    sizes = set(_sizes(variant.batch))
    if len(sizes) != 1:
        raise NotTried(
            "the tensors of the batch do not share their first dimension, so it cannot be repeated"
        )
    return replace(variant, batch=repeated(variant.batch))


def _sizes(batch: Any) -> list[int]:
    if isinstance(batch, torch.Tensor):
        return [batch.shape[0]] if batch.ndim else []
    parts = (
        batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    )
    return [size for part in parts for size in _sizes(part)]


def repeated(batch: Any) -> Any:
    """Put the tensors of the batch together with themselves; containers keep their kind."""
    if isinstance(batch, torch.Tensor):
        return torch.cat([batch] * TIMES) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: repeated(value) for key, value in batch.items()}
    return type(batch)(repeated(value) for value in batch) if isinstance(batch, (list, tuple)) else batch
