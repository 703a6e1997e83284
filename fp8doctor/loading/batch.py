"""The batch of one step: read the user's, or make one up from what the model says of its inputs, and say so.

A made-up batch lies on the model's device (the meta device too) and leaves every global random state alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8doctor.facts import Workload
from fp8doctor.facts.scrub import scrub
from fp8doctor.loading.job import Plan
from fp8doctor.wording import in_words

BATCH = 8
SEQUENCE = 2048
"""Size of a made-up batch, where neither the user nor the model says otherwise."""

GRIDS = {1: (16384,), 2: (224, 224), 3: (16, 112, 112)}
"""Extent of a made-up input by the dimensions of the first convolution."""

WAVEFORM = 64000
"""Samples of a made-up waveform: four seconds at 16 kHz."""

TRANSCRIPT = 32
"""Tokens of the labels of a made-up waveform."""

MORE_ROWS = 8
"""Rows a vision transformer may add to its patches at most: class, distillation and register tokens."""

POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_seq_length",
    "context_length",
    "n_ctx",
    "block_size",
)
"""Names under which configurations keep the longest sequence; the first that is there counts, as BigBird's
``block_size`` is another."""

POSITION_PARTS = ("pos", "wpe", "freqs_cis")
"""What names of position embeddings and rotary tables hold."""

TARGETS = ("labels", "targets", "target")
"""Arguments of a forward that take the tokens to predict."""

TOKENS = ("decoder_input_ids", "src", "tgt", "source", "y")
"""Arguments of a forward, besides the first, that are taken for tokens when they are required."""

BESIDES_TEXT = {"pixel_values": "images", "input_features": "sound", "input_values": "sound"}
"""Arguments of a forward that take something else beside tokens. A model that predicts tokens does without
it."""

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes that keep the model they wrap in ``module``."""


class NoBatchError(Exception):
    """No batch can be made up; the message says why."""


@dataclass(frozen=True)
class Batch:
    """A batch and where it came from."""

    value: Any
    source: Literal["given", "made up"] | None
    note: str | None


def resolve(
    model: Any, given: Any, *, size: int | None = None, sequence: int | None = None, plan: Plan | None = None
) -> Batch:
    """The user's batch, or one that is made up; without a value when the model does not tell its inputs."""
    if given is not None:
        return Batch(given, "given", None)
    try:
        value, made_of = _make_up(
            core(model),
            size or (plan.batch_size if plan else None),
            sequence or (plan.sequence_length if plan else None),
        )
    except NoBatchError as error:
        return Batch(None, None, f"no batch could be made up: {error}")
    except Exception as error:  # a model may compute anything in what is read here
        return Batch(None, None, f"no batch could be made up: {scrub(in_words(error))}")
    return Batch(value, "made up", f"made up: {made_of}")


def describe(
    model: Any, batch: Batch, *, computes_loss: bool, optimizer: bool, autocast: Any, accumulate: int
) -> Workload:
    """The workload as the facts record it. ``computes_loss`` and ``optimizer`` say whether the user gave
    one."""
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
    """The model inside ``torch.compile``, data-parallel wrappers and PEFT."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in WRAPPERS:
            inner = model.module
        if inner is None and type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def extent(model: Any, batch: Any) -> tuple[int | None, int | None, int | None]:
    """Batch size, sequence length and rows of the GEMMs (tokens), as far as the shapes of the batch tell
    them."""
    tensor = _main_tensor(batch)
    if tensor is None:
        return None, None, None
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return (None, None, tensor.numel()) if len(shape) < 2 else (shape[0], shape[-1], tensor.numel())
    if hasattr(_first_layer(model), "in_channels"):
        rows = _patch_rows(model, *shape[2:]) if len(shape) == 4 else None
        return shape[0] if shape else None, rows, shape[0] * rows if rows else None
    leading = shape[:-1]
    return leading[0] if leading else 1, leading[1] if len(leading) == 2 else None, math.prod(leading)


def _main_tensor(batch: Any) -> Any:
    """The tensor that sizes the step: ``input_ids``, else the first that is neither a target nor a mask."""
    named = list(_tensors(batch))
    inputs = [tensor for name, tensor in named if name not in TARGETS and "mask" not in name] or [
        tensor for _, tensor in named
    ]
    return dict(named).get("input_ids", inputs[0] if inputs else None)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, str(key))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, name)


class _Draw:
    """Random tensors on the model's device, from a generator of its own."""

    def __init__(self, model: Any) -> None:
        import torch

        floating = [
            each
            for each in model.parameters()
            if each.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        ]
        first = next(iter(floating), None)
        self._device = next(model.parameters()).device
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


def _make_up(model: Any, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """A batch and what it is made of. Raises `NoBatchError`."""
    draw = _Draw(model)
    kind = getattr(model, "main_input_name", None) if hasattr(model, "config") else None
    if kind == "pixel_values":
        return _images(model, draw, size)
    if kind == "input_values":
        return _waveforms(model, draw, size)
    if kind == "input_features":
        return _spectrograms(model, draw, size, sequence)
    if kind not in (None, "input_ids"):
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    first = _first_layer(model)
    if kind == "input_ids" or hasattr(first, "num_embeddings"):
        return _tokens(model, draw, size, sequence)
    if hasattr(first, "in_channels"):
        return _grids(model, first, draw, size)
    if first is not None:
        return _rows(model, first, draw, size, sequence)
    raise NoBatchError("the model has no embedding, convolution or Linear that would tell its inputs")


def _tokens(model: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Token ids, and the tokens to predict where the forward takes them."""
    parameters = _parameters(model)
    besides = [what for name, what in BESIDES_TEXT.items() if name in parameters]
    if besides and "labels" not in parameters:
        raise NoBatchError(f"forward takes text and {besides[0]}")
    if "decoder_input_values" in parameters:
        raise NoBatchError("forward takes text and makes sound")
    vocabulary = _vocabulary(model)
    longest = _longest(model)
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
    bare = len(batch) == 1 and not hasattr(model, "main_input_name")
    without = "".join(f", no {what}" for what in besides)
    return (
        ids if bare else batch,
        f"{ids.shape[0]} x {ids.shape[1]} random tokens of a vocabulary of {vocabulary}{without}",
    )


def _labels(model: Any, draw: _Draw, ids: Any) -> Any:
    """What a model of this class predicts from these tokens; None where that is not known."""
    kind = type(model).__name__
    if "ForSequenceClassification" in kind:
        return _classes(model, draw, ids.shape[:1])
    if "ForTokenClassification" in kind:
        return _classes(model, draw, tuple(ids.shape))
    return None if "ForMultipleChoice" in kind or "ForNextSentence" in kind else ids


def _classes(model: Any, draw: _Draw, shape: tuple[int, ...]) -> Any:
    """Class labels; with a single label transformers regresses, on numbers."""
    return (
        draw.floats(shape) if model.config.num_labels == 1 else draw.integers(model.config.num_labels, shape)
    )


def _images(model: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Pixels as a transformers configuration describes them."""
    if "input_ids" in _parameters(model):
        raise NoBatchError("forward takes text and images")
    config = getattr(model.config, "vision_config", model.config)
    extents = _pair(getattr(config, "image_size", None)) or GRIDS[2]
    frames = (config.num_frames,) if isinstance(getattr(config, "num_frames", None), int) else ()
    shape = (size or BATCH, *frames, getattr(config, "num_channels", 3), *extents)
    batch = {"pixel_values": draw.floats(shape)}
    if type(model).__name__.endswith(("ForImageClassification", "ForVideoClassification")):
        batch["labels"] = _classes(model, draw, shape[:1])
    return batch, f"{_times(shape)} random pixels"


def _waveforms(model: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Sound for models that begin with convolutions over the waveform (wav2vec 2.0 and its kin)."""
    if not hasattr(model.config, "conv_stride"):
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    shape = (size or BATCH, WAVEFORM)
    batch = {"input_values": draw.floats(shape)}
    if "ForCTC" in type(model).__name__:
        batch["labels"] = draw.integers(model.config.vocab_size - 1, (shape[0], TRANSCRIPT)) + 1
    if "ForSequenceClassification" in type(model).__name__:
        batch["labels"] = _classes(model, draw, shape[:1])
    return batch, f"{_times(shape)} random samples of sound"


def _spectrograms(model: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Mel spectrograms and a transcript for Whisper and its kin."""
    config = model.config
    if not (
        hasattr(config, "num_mel_bins")
        and hasattr(config, "max_source_positions")
        and hasattr(config, "max_target_positions")
    ):
        raise NoBatchError(f"the inputs of {type(model).__name__} are not known")
    shape = (size or BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    target = "labels" if "labels" in _parameters(model) else "decoder_input_ids"
    batch = {
        "input_features": draw.floats(shape),
        target: draw.integers(config.vocab_size, (shape[0], sequence or config.max_target_positions)),
    }
    return batch, f"{_times(shape)} random mel features, {_times(tuple(batch[target].shape))} tokens"


def _grids(model: Any, first: Any, draw: _Draw, size: int | None) -> tuple[Any, str]:
    """Images, or sequences or volumes, for a model that begins with a convolution."""
    _refuse_more_arguments(model)
    dimensions = len(first.kernel_size)
    extents = (_image_size(model) if dimensions == 2 else None) or GRIDS[dimensions]
    shape = (size or BATCH, _known(first.in_channels), *extents)
    return draw.floats(
        shape
    ), f"{_times(shape)} random numbers, for a first {type(first).__name__} with {first.in_channels} channels"


def _rows(model: Any, first: Any, draw: _Draw, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Vectors for a model that begins with a Linear; sequences of them where it attends, or where a length is
    asked for."""
    _refuse_more_arguments(model)
    if _attends(model) and sequence is None:
        sequence = min(SEQUENCE, _longest(model) or SEQUENCE)
    leading = (size or BATCH, sequence) if sequence else (size or BATCH * SEQUENCE,)
    shape = (*leading, _known(first.in_features))
    return draw.floats(
        shape
    ), f"{_times(shape)} random numbers, for a first {type(first).__name__} of {first.in_features} inputs"


def _refuse_more_arguments(model: Any) -> None:
    for name, required in list(_parameters(model).items())[1:]:
        if required:
            raise NoBatchError(f"forward also needs {name!r}")


def _parameters(model: Any) -> dict[str, bool]:
    """Arguments of the forward, and whether each is required."""
    try:
        found = list(inspect.signature(type(model).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {
        each.name: each.default is each.empty
        for each in found
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }


def _first_layer(model: Any) -> Any:
    """The first embedding, convolution or linear layer in the order of definition, embeddings of positions
    left out."""
    for name, module in model.named_modules():
        embeds = isinstance(getattr(module, "num_embeddings", None), int) and not _is_of_positions(name)
        convolves = isinstance(getattr(module, "in_channels", None), int) and isinstance(
            getattr(module, "kernel_size", None), tuple
        )
        if embeds or convolves or isinstance(getattr(module, "in_features", None), int):
            return module
    return None


def _vocabulary(model: Any) -> int:
    """Tokens that the input embedding and the configuration both know."""
    embedding = model.get_input_embeddings() if hasattr(model, "main_input_name") else _first_layer(model)
    sizes = (getattr(_text_config(model), "vocab_size", None), getattr(embedding, "num_embeddings", None))
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        raise NoBatchError("the model does not tell the size of its vocabulary")
    return min(known)


def _longest(model: Any) -> int | None:
    """The longest sequence the model takes, as its configuration, position embeddings or masks tell; None
    when nothing does."""
    config = _text_config(model)
    found = [
        next((size for key in POSITION_KEYS if isinstance(size := getattr(config, key, None), int)), None)
    ]
    if hasattr(model, "main_input_name"):
        # RoBERTa and its kin begin to count behind the padding: the first positions are no token's.
        tables = [
            each
            for name, each in model.named_modules()
            if _is_of_positions(name) and hasattr(each, "num_embeddings")
        ]
        found += [
            each.num_embeddings - each.padding_idx - 1 for each in tables if each.padding_idx is not None
        ]
    else:
        found += [
            each.num_embeddings
            for name, each in model.named_modules()
            if _is_of_positions(name) and hasattr(each, "num_embeddings")
        ]
        held = [*model.named_parameters(), *model.named_buffers()]
        found += [
            each.shape[-2]
            for name, each in held
            if each.dim() in (2, 3) and (_is_of_positions(name) or name.rpartition(".")[2] == "pe")
        ]
        found += [
            each.shape[-1]
            for _, each in model.named_buffers()
            if each.dim() >= 2 and each.shape[-1] == each.shape[-2]
        ]
    known = [each for each in found if isinstance(each, int) and each > 0]
    return min(known) if known else None


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_of_positions(name: str) -> bool:
    parts = name.removesuffix(".weight").rpartition(".")[2].lower()
    return any(part in parts for part in POSITION_PARTS)


def _attends(model: Any) -> bool:
    return any(
        "attention" in label or "attn" in label
        for name, each in model.named_modules()
        for label in (name.lower(), type(each).__name__.lower())
    )


def _image_size(model: Any) -> tuple[int, ...] | None:
    """What the model, its configuration or its patch embedding keep as the size of an image."""
    for owner in (getattr(model, "config", None), *model.modules()):
        for key in ("image_size", "img_size"):
            if pair := _pair(getattr(owner, key, None)):
                return pair
    return None


def _patch_rows(model: Any, height: int, width: int) -> int | None:
    """Rows of the GEMMs for one image in a vision transformer: its patches, and the tokens it adds; None for
    others.

    Models of several stages (Swin, ConvNeXt) merge patches on the way: their rows are not one number.
    """
    first = _first_layer(model)
    if first.kernel_size != first.stride or first.stride[0] < 2:
        return None
    patches: int = (height // first.stride[0]) * (width // first.stride[1])
    held = [
        each.shape[-2]
        for name, each in model.named_parameters()
        if _is_of_positions(name) and each.dim() in (2, 3)
    ]
    known = next((rows for rows in held if patches <= rows <= patches + MORE_ROWS), None)
    return known if known is not None or not _keeps_its_width(model, first.out_channels) else patches


def _keeps_its_width(model: Any, width: int) -> bool:
    """Whether every linear layer starts from this width, or leads back to it."""
    sides = [
        (each.in_features, each.out_features)
        for each in model.modules()
        if isinstance(getattr(each, "in_features", None), int)
    ]
    return all(width in side for side in sides)


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return value[0], value[1]
    return None


def _known(features: int) -> int:
    if features < 1:
        raise NoBatchError("the first layer is lazy and learns its inputs from the first batch")
    return features


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
