"""Resolve the batch of a step: the user's, or a random one from what the model shows of its inputs.

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
    as_pair,
    attends,
    declared_image,
    first_layer,
    image_size,
    longest_sequence,
    made_before,
    parameters_of,
    patch_rows,
    vocabulary_of,
)
from fp8doctor.loading.trainer import own_batch
from fp8doctor.stacks.looking import home, method, read, tensors_of
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.stacks.torch_private import behind_compile
from fp8doctor.wording import error_in_words

BATCH = 8
SEQUENCE = 2048
"""Default size of a synthetic batch."""

GRIDS = {1: (16384,), 2: (224, 224), 3: (16, 112, 112)}
"""Dimensions of the first convolution -> extent of the input."""

WAVEFORM = 64000
"""Samples of a waveform: four seconds at 16 kHz."""

TRANSCRIPT = 32
"""Tokens of a waveform's labels."""

TARGETS = ("labels", "targets", "target")
"""Arguments that take the tokens to predict."""

TOKENS = ("decoder_input_ids", "src", "tgt", "source", "y")
"""Arguments that take tokens if required, besides the first."""

NOISE_LEVELS = ("timestep", "timesteps")
"""Arguments that a diffusion model needs, even with a default."""

IMAGES = ("img", "imgs", "image", "images", "pixel_values", "video", "videos", "latent", "latents", "sample")
"""First arguments that are no rows of a Linear."""

BESIDES_TEXT = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}
"""Arguments that a model which predicts tokens does not need."""


class _Draw:
    """Random tensors on the model's device, from their own generator."""

    def __init__(self, model: Any) -> None:
        import torch

        floating = [
            each
            for _, each in tensors_of(model, "_parameters")
            if each.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        ]
        first = next(iter(floating), None)
        self._device = next(tensors_of(model, "_parameters"))[1].device
        self._dtype = first.dtype if first is not None else torch.bfloat16
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
    draw = _Draw(model)
    kind = read(model, "main_input_name") if read(model, "config") is not None else None
    if kind == "pixel_values":
        return _images(model, draw, size)
    if kind == "input_values":
        return _waveforms(model, draw, size)
    if kind == "input_features":
        return _spectrograms(model, draw, size, sequence)
    if kind not in (None, "input_ids"):
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    first = first_layer(model)
    if kind == "input_ids" or read(first, "num_embeddings") is not None:
        return _tokens(model, draw, size, sequence)
    if read(first, "in_channels") is not None:
        return _grids(model, first, draw, size)
    if first is not None:
        return _rows(model, first, draw, size, sequence)
    raise NoBatchError("the model has no embedding, convolution or Linear that would tell its inputs")


def _tokens(model: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make token ids, and the tokens to predict if the forward takes them."""
    parameters = parameters_of(model)
    besides = [what for name, what in BESIDES_TEXT.items() if name in parameters]
    if besides and "labels" not in parameters:
        raise NoBatchError(f"forward takes text and {besides[0]}")
    if "decoder_input_values" in parameters:
        raise NoBatchError("forward takes text and makes sound")
    vocabulary = vocabulary_of(model)
    longest = longest_sequence(model)
    ids = draw.integers(vocabulary, (size or BATCH, sequence or min(SEQUENCE, longest or SEQUENCE)))
    main = "input_ids" if "input_ids" in parameters else next(iter(parameters), "")
    batch = {main: ids}
    for name, required in parameters.items():
        if name == main:
            continue
        if name in TARGETS:
            labels = _labels(model, draw, ids)
            batch.update({name: labels} if labels is not None else {})
        elif required and name == "attention_mask":
            batch[name] = ids.new_ones(ids.shape)
        elif required and name in TOKENS:
            batch[name] = ids
        elif required:
            raise NoBatchError(f"forward also needs {name!r}")
    if "decoder_input_ids" in parameters and not set(TARGETS) & set(batch):
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
    if "ForSequenceClassification" in kind:
        return _classes(model, draw, ids.shape[:1])
    if "ForTokenClassification" in kind:
        return _classes(model, draw, tuple(ids.shape))
    return None if "ForMultipleChoice" in kind or "ForNextSentence" in kind else ids


def _classes(model: Any, draw: _Draw, shape: tuple[int, ...]) -> Any:
    """Return class labels; with a single label transformers regresses on numbers."""
    labels = read(read(model, "config"), "num_labels")
    return draw.floats(shape) if labels == 1 else draw.integers(labels, shape)


def _images(model: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Make pixels as a transformers configuration describes them."""
    if "input_ids" in parameters_of(model):
        raise NoBatchError("forward takes text and images")
    config = read(model, "config")
    config = read(config, "vision_config", config)
    extents = as_pair(read(config, "image_size")) or GRIDS[2]
    frames = (count,) if isinstance(count := read(config, "num_frames"), int) else ()
    shape = (size or BATCH, *frames, read(config, "num_channels", 3), *extents)
    batch = {"pixel_values": draw.floats(shape)}
    if type(model).__name__.endswith(("ForImageClassification", "ForVideoClassification")):
        batch["labels"] = _classes(model, draw, shape[:1])
    return batch, f"{_times(shape)} random pixels"


def _waveforms(model: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Make sound for models like wav2vec 2.0."""
    config = read(model, "config")
    if read(config, "conv_stride") is None:
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    shape = (size or BATCH, WAVEFORM)
    batch = {"input_values": draw.floats(shape)}
    if "ForCTC" in type(model).__name__:
        batch["labels"] = draw.integers(read(config, "vocab_size") - 1, (shape[0], TRANSCRIPT)) + 1
    if "ForSequenceClassification" in type(model).__name__:
        batch["labels"] = _classes(model, draw, shape[:1])
    return batch, f"{_times(shape)} random samples of sound"


def _spectrograms(model: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make mel spectrograms and a transcript for models like Whisper."""
    config = read(model, "config")
    bins, sources, targets = (
        read(config, name) for name in ("num_mel_bins", "max_source_positions", "max_target_positions")
    )
    if None in (bins, sources, targets):
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    shape = (size or BATCH, bins, 2 * sources)
    target = "labels" if "labels" in parameters_of(model) else "decoder_input_ids"
    batch = {
        "input_features": draw.floats(shape),
        target: draw.integers(read(config, "vocab_size"), (shape[0], sequence or targets)),
    }
    return batch, f"{_times(shape)} random mel features, {_times(tuple(batch[target].shape))} tokens"


def _grids(model: Any, first: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Make images, sequences or volumes for a first convolution."""
    _refuse_more_arguments(model)
    dimensions = len(read(first, "kernel_size"))
    channels = read(first, "in_channels")
    extents = (image_size(model) if dimensions == 2 else None) or GRIDS[dimensions]
    shape = (size or BATCH, _known(channels), *extents)
    return draw.floats(
        shape
    ), f"{_times(shape)} random numbers, for a first {type(first).__name__} with {channels} channels"


def _rows(model: Any, first: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make vectors for a first Linear, as sequences if the model attends."""
    _refuse_more_arguments(model)
    if image := declared_image(model):
        shape = (size or BATCH, image[0], *(image_size(model) or image[1:]))
        return draw.floats(shape), f"{_times(shape)} random pixels"
    _refuse_what_is_no_row(model, first)
    if attends(model) and sequence is None:
        sequence = min(SEQUENCE, longest_sequence(model) or SEQUENCE)
    leading = (size or BATCH, sequence) if sequence else (size or BATCH * SEQUENCE,)
    features = read(first, "in_features")
    shape = (*leading, _known(features))
    return draw.floats(
        shape
    ), f"{_times(shape)} random numbers, for a first {type(first).__name__} of {features} inputs"


def _refuse_more_arguments(model: Any) -> None:
    for name, required in list(parameters_of(model).items())[1:]:
        if required or name in NOISE_LEVELS:
            raise NoBatchError(f"forward also needs {name!r}")


def _refuse_what_is_no_row(model: Any, first: Any) -> None:
    """Raise `NoBatchError` if the first Linear does not multiply the input itself."""
    named = next(iter(parameters_of(model)), "")
    if named in IMAGES:
        raise NoBatchError(f"forward takes {named!r}, whose size the model does not tell")
    before = made_before(model, first)
    if before is not None:
        raise NoBatchError(f"{type(before).__name__} makes the inputs of the first {type(first).__name__}")


def _known(features: int) -> int:
    if features < 1:
        raise NoBatchError("the first layer is lazy and learns its inputs from the first batch")
    return features


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


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
