"""Resolve the batch of a step, the user's or a synthetic one, and its workload."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8doctor.facts import Workload
from fp8doctor.loading.job import TrainerPlan, is_trainer
from fp8doctor.loading.model_inputs import NoBatchError, declared_image, first_layer, patch_rows
from fp8doctor.loading.synthetic_batch import TARGETS, synthetic_batch
from fp8doctor.loading.trainer import own_batch
from fp8doctor.stacks.looking import home, method, read
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.stacks.torch_private import behind_compile
from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes that keep the wrapped model in ``module``."""


@dataclass(frozen=True)
class Batch:
    """A batch and its source."""

    value: Any
    source: Literal["given", "made up"] | None
    note: str | None


def resolve(
    model: Any,
    given: Any,
    *,
    size: int | None = None,
    sequence: int | None = None,
    plan: TrainerPlan | None = None,
    trainer: Any = None,
) -> Batch:
    """Return the user's batch, the Trainer's, a synthetic one, or none."""
    if given is not None:
        return Batch(given, "given", None)
    if (
        size is None
        and sequence is None
        and is_trainer(trainer)
        and read(trainer, "train_dataset") is not None
    ):
        try:
            return Batch(own_batch(trainer, core(model)), "given", "from the Trainer's own data")
        except NoBatchError as error:
            made = resolve(model, None, plan=plan)
            return replace(made, note=f"{made.note}; the Trainer's own data gave none: {error}")
    try:
        value, made_of = synthetic_batch(
            core(model),
            size or (plan.batch_size if plan else None),
            sequence or (plan.sequence_length if plan else None),
        )
    except NoBatchError as error:
        return Batch(None, None, f"no synthetic batch could be built: {error}")
    except Exception as error:  # a model may compute anything in what is read here
        _log.debug("no synthetic batch could be built", exc_info=True)
        return Batch(None, None, f"no synthetic batch could be built: {error_in_words(error)}")
    return Batch(value, "made up", f"synthetic: {made_of}")


def describe(
    model: Any, batch: Batch, *, computes_loss: bool, optimizer: bool, autocast: Any, accumulate: int
) -> Workload:
    """Describe the workload; ``computes_loss`` and ``optimizer``: the user gave them."""
    try:
        size, sequence, tokens = extent(core(model), batch.value)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # nested tensors have no shape
        size = sequence = tokens = None
    has_labels = isinstance(batch.value, Mapping) and "labels" in batch.value
    return Workload(
        batch_source=batch.source,
        batch_size=size,
        sequence_length=sequence,
        tokens=tokens,
        note=batch.note,
        loss_source="given" if computes_loss else "output.loss" if has_labels else "mean",
        optimizer_source="given" if optimizer else "made up",
        autocast_source="none" if autocast is None else "given",
        accumulate=accumulate,
    )


def core(model: Any) -> Any:
    """Return the model inside ``torch.compile``, data-parallel wrappers and PEFT."""
    while True:
        inner = behind_compile(model)
        if inner is None and type(model).__name__ in WRAPPERS:
            inner = read(model, "module")
        if (
            inner is None
            and home(type(model)).startswith("peft.")
            and (ask := method(model, "get_base_model"))
        ):
            inner = ask()
        if inner is None or inner is model:
            return model
        model = inner


def extent(model: Any, batch: Any) -> tuple[int | None, int | None, int | None]:
    """Return batch size, sequence length and matmul rows (tokens) of a batch."""
    tensor = _main_tensor(batch)
    if tensor is None:
        return None, None, None
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return (None, None, tensor.numel()) if len(shape) < 2 else (shape[0], shape[-1], tensor.numel())
    if read(first_layer(model), "in_channels") is not None:
        rows = patch_rows(model, *shape[2:]) if len(shape) == 4 else None
        return shape[0] if shape else None, rows, shape[0] * rows if rows else None
    if len(shape) == 4 and declared_image(model):
        return shape[0], None, None
    leading = _leading(shape, read(first_layer(model), "in_features"))
    if leading is None:
        return shape[0], None, None
    return leading[0] if leading else 1, leading[1] if len(leading) == 2 else None, math.prod(leading)


def _leading(shape: tuple[int, ...], width: Any) -> tuple[int, ...] | None:
    """Return the dimensions of rows, or None for images with unknown rows."""
    if isinstance(width, int) and shape[-1:] != (width,):
        for at in range(1, len(shape) - 1):
            if math.prod(shape[at:]) == width:
                return shape[:at]
    return shape[:-1] if len(shape) < 4 or shape[-1] == width else None


def _main_tensor(batch: Any) -> Any:
    """Return ``input_ids``, else the first tensor that is no target or mask."""
    named = [(str(key), tensor) for key, tensor in named_tensors(batch)]
    inputs = [tensor for name, tensor in named if name not in TARGETS and "mask" not in name] or [
        tensor for _, tensor in named
    ]
    return dict(named).get("input_ids", inputs[0] if inputs else None)
