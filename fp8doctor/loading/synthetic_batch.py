"""Resolve the batch of a step: the user's, or a random one: tokens, images or rows of a Linear.

A random batch is on the model's device (also meta) and leaves global random states alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fp8doctor.facts import Workload
from fp8doctor.loading.job import TrainerPlan, is_trainer
from fp8doctor.loading.model_inputs import (
    NoBatchError,
    attends,
    first_layer,
    image_shape,
    longest_sequence,
    made_before,
    parameters_of,
    vocabulary_of,
)
from fp8doctor.loading.trainer import own_batch
from fp8doctor.stacks.looking import home, method, read, tensors_of
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.stacks.torch_private import wrapped_child
from fp8doctor.wording import error_in_words

BATCH = 8
SEQUENCE = 2048
"""Default size of a synthetic batch."""

TARGETS = ("labels", "targets", "target")
"""Arguments that take the tokens to predict."""

TOKENS = ("decoder_input_ids", "src", "tgt", "source", "y")
"""Arguments that take tokens if required, besides the first."""

NEEDED = ("timestep", "timesteps", "decoder_input_values")
"""Arguments that a model needs, even with a default."""

BESIDES_TEXT = {"pixel_values": "images", "input_features": "sound"}
"""Arguments that a model which predicts tokens does not need."""

IMAGES = ("img", "imgs", "image", "images", "pixel_values", "video", "videos", "latent", "latents", "sample")
"""First arguments that are no rows of a Linear."""


class _Draw:
    """Random tensors on the model's device, from their own generator."""

    def __init__(self, model: Any) -> None:
        import torch

        parameters = [each for _, each in tensors_of(model, "_parameters")]
        wide = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        self._device = parameters[0].device
        self._dtype = next((each.dtype for each in parameters if each.dtype in wide), torch.bfloat16)
        self._generator = torch.Generator("cpu").manual_seed(0)

    def integers(self, below: int, shape: tuple[int, ...]) -> Any:
        import torch

        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(below, shape, generator=self._generator, device="cpu").to(self._device)

    def floats(self, shape: tuple[int, ...]) -> Any:
        import torch

        if self._device.type == "meta":
            return torch.empty(shape, dtype=self._dtype, device="meta")
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu").to(
            self._device, self._dtype
        )


def synthetic_batch(model: Any, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make a batch and describe it. Raises `NoBatchError`."""
    draw, first, arguments = _Draw(model), first_layer(model), parameters_of(model)
    kind = read(model, "main_input_name") if read(model, "config") is not None else None
    if kind == "input_ids" or (kind is None and read(first, "num_embeddings") is not None):
        return _tokens(model, draw, arguments, size, sequence)
    for name, required in [*arguments.items()][1:] if kind is None else ():
        if required or name in NEEDED:
            raise NoBatchError(f"forward also needs {name!r}")
    image = image_shape(model, first)
    if image is not None and "input_ids" not in arguments and kind in (None, "pixel_values"):
        shape = (size or BATCH, *image)
        pixels, described = draw.floats(shape), f"{_times(shape)} random pixels"
        if kind is None:
            return pixels, described
        classes = type(model).__name__.endswith("ForImageClassification")
        labels = {"labels": _classes(model, draw, shape[:1])} if classes else {}
        return {kind: pixels, **labels}, described
    width = read(first, "in_features")
    if kind is None and type(width) is int and width > 0 and next(iter(arguments), "") not in IMAGES:
        if before := made_before(model, first):
            raise NoBatchError(f"{before} makes the inputs of the first {type(first).__name__}")
        if attends(model) and sequence is None:
            sequence = min(SEQUENCE, longest_sequence(model) or SEQUENCE)
        shape = (size or BATCH, sequence, width) if sequence else (size or BATCH * SEQUENCE, width)
        described = f"{_times(shape)} random numbers, for a first {type(first).__name__} of {width} inputs"
        return draw.floats(shape), described
    kinds = "tokens, images or rows of a Linear"
    raise NoBatchError(f"the inputs of {type(model).__name__} are not known to be {kinds}")


def _tokens(
    model: Any, draw: _Draw, arguments: Mapping[str, bool], size: int | None, sequence: int | None
) -> tuple[Any, str]:
    """Make token ids, and the tokens to predict if the forward takes them."""
    vocabulary, longest = vocabulary_of(model), longest_sequence(model)
    ids = draw.integers(vocabulary, (size or BATCH, sequence or min(SEQUENCE, longest or SEQUENCE)))
    main = "input_ids" if "input_ids" in arguments else next(iter(arguments), "")
    besides = [what for name, what in BESIDES_TEXT.items() if name in arguments]
    if besides and not set(TARGETS) & {*arguments}:
        raise NoBatchError(f"forward takes text and {besides[0]}")
    batch = {main: ids}
    for name, required in arguments.items():
        if name in TARGETS:
            labels = _labels(model, draw, ids)
            batch.update({name: labels} if labels is not None else {})
        elif required and name == "attention_mask":
            batch[name] = ids.new_ones(ids.shape)
        elif required and name in TOKENS:
            batch[name] = ids
        elif name != main and (required or name in NEEDED):
            raise NoBatchError(f"forward also needs {name!r}")
    if "decoder_input_ids" in arguments and not set(TARGETS) & set(batch):
        batch["decoder_input_ids"] = ids
    bare = len(batch) == 1 and read(model, "main_input_name") is None
    without = "".join(f", no {what}" for what in besides)
    return (
        ids if bare else batch,
        f"{ids.shape[0]} x {ids.shape[1]} random tokens of a vocabulary of {vocabulary}{without}",
    )


def _labels(model: Any, draw: _Draw, ids: Any) -> Any:
    """Return labels for these tokens by the model's class, or None if unknown."""
    kind = type(model).__name__
    if "Classification" in kind:
        return _classes(model, draw, tuple(ids.shape if "Token" in kind else ids.shape[:1]))
    return None if "ForMultipleChoice" in kind or "ForNextSentence" in kind else ids


def _classes(model: Any, draw: _Draw, shape: tuple[int, ...]) -> Any:
    """Return class labels; with a single label transformers regresses on numbers."""
    labels = read(read(model, "config"), "num_labels")
    return draw.floats(shape) if labels == 1 else draw.integers(labels, shape)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


_log = logging.getLogger("fp8doctor")


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
        return Batch(None, None, f"no synthetic batch could be built: {error}; write example_batch()")
    except Exception as error:  # a model may compute anything in what is read here
        _log.debug("no synthetic batch could be built", exc_info=True)
        return Batch(
            None,
            None,
            f"no synthetic batch could be built: {error_in_words(error).rstrip('.')}; write example_batch()",
        )
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
        inner = wrapped_child(model)
        ask = method(model, "get_base_model") if home(type(model)).startswith("peft.") else None
        if inner is None and ask is not None:
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
    width = read(first_layer(model), "in_features")
    if shape[-1:] != (width,) and (len(shape) > 3 or isinstance(width, int)):
        return shape[0] if shape else None, None, None  # images: the rows depend on the model's code
    leading = shape[:-1]
    return leading[0] if leading else 1, leading[1] if len(leading) == 2 else None, math.prod(leading)


def _main_tensor(batch: Any) -> Any:
    """Return ``input_ids``, else the first tensor that is no target or mask."""
    named = [(str(key), tensor) for key, tensor in named_tensors(batch)]
    inputs = [tensor for name, tensor in named if name not in TARGETS and "mask" not in name] or [
        tensor for _, tensor in named
    ]
    return dict(named).get("input_ids", inputs[0] if inputs else None)
