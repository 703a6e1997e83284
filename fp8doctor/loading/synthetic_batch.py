"""Make a random batch from what the model shows of its inputs.

It is on the model's device (also meta) and leaves global random states alone.
"""

from __future__ import annotations

from typing import Any

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
    vocabulary_of,
)
from fp8doctor.stacks.looking import read, tensors_of

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
