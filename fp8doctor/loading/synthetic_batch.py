"""Resolve the batch of a step: the user's, or a random one: tokens, images or rows of a Linear.

A random batch is on the model's device (also meta) and leaves global random states alone.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8doctor.facts import Workload
from fp8doctor.stacks.looking import children_of, home, method, modules_of, read, read_class, tensors_of
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.stacks.torch_private import wrapped_child
from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")

BATCH = 8
SEQUENCE = 2048
IMAGE = (224, 224)
"""Default sizes of a synthetic batch."""

TARGETS = ("labels", "targets", "target")
"""Arguments that take the tokens to predict."""

NEEDED = ("timestep", "timesteps", "decoder_input_values")
"""Arguments that a model needs, even with a default."""

BESIDES_TEXT = {"pixel_values": "images", "input_features": "sound"}
"""Arguments that a model which predicts tokens does not need."""

NO_TOKENS = ("Classification", "ForMultipleChoice", "ForNextSentence")
"""In names of transformers' classes whose labels are no tokens: they get none."""

IMAGES = ("img", "imgs", "image", "images", "pixel_values", "video", "videos", "latent", "latents", "sample")
"""First arguments that are no rows of a Linear."""

POSITION_KEYS = tuple(
    """
    max_position_embeddings n_positions max_target_positions max_seq_len max_seq_length context_length
    n_ctx block_size
    """.split()
)
"""Settings with the longest sequence; the first counts, because BigBird's ``block_size`` is another."""

POSITION_PARTS = ("pos", "wpe", "freqs_cis")
"""In names of position embeddings and rotary tables."""


class NoBatchError(Exception):
    """No batch can be made; the message says why."""


def synthetic_batch(model: Any, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make a batch and describe it. Raises `NoBatchError`."""
    first, arguments = first_layer(model), _arguments(model)
    kind = read(model, "main_input_name") if read(model, "config") is not None else None
    if kind == "input_ids" or (kind is None and read(first, "num_embeddings") is not None):
        return _tokens(model, first, arguments, size, sequence)
    for name, required in [*arguments.items()][1:] if kind is None else ():
        if required or name in NEEDED:
            raise NoBatchError(f"forward also needs {name!r}")
    image = _image_shape(model, first)
    if image is not None and "input_ids" not in arguments and kind in (None, "pixel_values"):
        pixels = _random(model, (size or BATCH, *image))
        return pixels if kind is None else {kind: pixels}, f"{_times(pixels.shape)} random pixels"
    width = read(first, "in_features")
    if kind is None and type(width) is int and width > 0 and next(iter(arguments), "") not in IMAGES:
        if before := _made_before(model, first):
            raise NoBatchError(f"{before} makes the inputs of the first {type(first).__name__}")
        labels = (f"{name} {type(each).__name__}".lower() for name, each in modules_of(model))
        if sequence is None and any("attention" in label or "attn" in label for label in labels):
            raise NoBatchError("the model attends, and the length of its sequences is not known")
        rows = _random(
            model, (size or BATCH, sequence, width) if sequence else (size or BATCH * SEQUENCE, width)
        )
        kind = type(first).__name__
        return rows, f"{_times(rows.shape)} random numbers, for a first {kind} of {width} inputs"
    kinds = "tokens, images or rows of a Linear"
    raise NoBatchError(f"the inputs of {type(model).__name__} are not known to be {kinds}")


def _tokens(
    model: Any, first: Any, arguments: Mapping[str, bool], size: int | None, sequence: int | None
) -> tuple[Any, str]:
    vocabulary = _vocabulary(model, first)
    shape = (size or BATCH, sequence or min(SEQUENCE, _longest_sequence(model) or SEQUENCE))
    ids = _random(model, shape, vocabulary)
    main = "input_ids" if "input_ids" in arguments else next(iter(arguments), "")
    besides = [what for name, what in BESIDES_TEXT.items() if name in arguments]
    if besides and not set(TARGETS) & {*arguments}:
        raise NoBatchError(f"forward takes text and {besides[0]}")
    predicts = not any(each in type(model).__name__ for each in NO_TOKENS)
    batch = {main: ids}
    for name, required in arguments.items():
        if name in TARGETS and predicts:
            batch[name] = ids
        elif required and name == "attention_mask":
            batch[name] = ids.new_ones(ids.shape)
        elif name != main and (required or name in NEEDED):
            raise NoBatchError(f"forward also needs {name!r}")
    if "decoder_input_ids" in arguments and not set(TARGETS) & set(batch):
        batch["decoder_input_ids"] = ids
    bare = len(batch) == 1 and read(model, "main_input_name") is None
    without = "".join(f", no {what}" for what in besides)
    return ids if bare else batch, f"{_times(shape)} random tokens of a vocabulary of {vocabulary}{without}"


def _random(model: Any, shape: tuple[int, ...], below: int | None = None) -> Any:
    """Draw token ids ``below`` a number, else numbers in the model's dtype, on its device."""
    import torch

    parameters = [each for _, each in tensors_of(model, "_parameters")]
    wide = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    dtype = next((each.dtype for each in parameters if each.dtype in wide), torch.bfloat16)
    device = parameters[0].device
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype if below is None else torch.int64, device="meta")
    generator = torch.Generator("cpu").manual_seed(0)
    if below is not None:
        return torch.randint(below, shape, generator=generator, device="cpu").to(device)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(device, dtype)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _arguments(model: Any) -> dict[str, bool]:
    try:
        found = list(inspect.signature(read_class(type(model), "forward")).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    named = (each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return {each.name: each.default is each.empty for each in named}


def first_layer(model: Any) -> Any:
    for name, module in modules_of(model):
        embeds = isinstance(read(module, "num_embeddings"), int) and not _is_of_positions(name)
        convolves = isinstance(read(module, "in_channels"), int) and isinstance(
            read(module, "kernel_size"), tuple
        )
        if embeds or convolves or isinstance(read(module, "in_features"), int):
            return module
    return None


def _made_before(model: Any, first: Any) -> str | None:
    """Name a class of the user's without parameters, like Rearrange, that comes before a layer, or None."""
    for _, module in modules_of(model):
        if module is first:
            break
        own = not home(type(module)).startswith("torch.nn.")
        if own and not children_of(module) and not any(tensors_of(module, "_parameters")):
            return type(module).__name__
    return None


def _vocabulary(model: Any, first: Any) -> int:
    """Count the tokens that both input embedding and configuration know."""
    ask = method(model, "get_input_embeddings")
    try:
        embedding = ask() if ask else first
    except Exception:  # transformers raises where a model of several inputs does not name one
        _log.debug("get_input_embeddings raises", exc_info=True)
        embedding = first
    sizes = (read(_text_config(model), "vocab_size"), read(embedding, "num_embeddings"))
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        raise NoBatchError("the model does not tell the size of its vocabulary")
    return min(known)


def _longest_sequence(model: Any) -> int | None:
    config = _text_config(model)
    found = [next((size for key in POSITION_KEYS if isinstance(size := read(config, key), int)), None)]
    for name, module in modules_of(model):
        if _is_of_positions(name) and isinstance(rows := read(module, "num_embeddings"), int):
            padding = read(module, "padding_idx")
            # RoBERTa and similar models count after the padding: the first positions are no token's.
            found.append(rows if padding is None else rows - padding - 1)
    for held in ("_parameters", "_buffers") if config is None else ():
        tables = (each for name, each in tensors_of(model, held) if _is_of_positions(name))
        found += [each.shape[-2] for each in tables if each.dim() in (2, 3)]
    return min((each for each in found if isinstance(each, int) and each > 0), default=None)


def _text_config(model: Any) -> Any:
    config = read(model, "config")
    ask = method(config, "get_text_config")
    return ask() if ask else config


def _is_of_positions(name: str) -> bool:
    parts = name.removesuffix(".weight").rpartition(".")[2].lower()
    return any(part in parts for part in POSITION_PARTS)


def _image_shape(model: Any, first: Any) -> tuple[int, ...] | None:
    """Return channels, height and width of the images that a model takes; None if it tells none.

    Read from timm's configuration, else from that of transformers, else from a first Conv2d.
    """
    declared = read(model, "pretrained_cfg", read(model, "default_cfg"))
    size = declared.get("input_size") if isinstance(declared, dict) else read(declared, "input_size")
    if isinstance(size, tuple | list) and len(size) == 3 and all(type(each) is int for each in size):
        return tuple(size)
    config = read(model, "config")
    config = read(config, "vision_config", config)
    channels = read(first, "in_channels", read(config, "num_channels", 0))
    dimensions = len(read(first, "kernel_size", (0, 0)))
    if type(channels) is not int or channels < 1 or dimensions != 2 or read(config, "num_frames") is not None:
        return None
    for owner in (config, *(each for _, each in modules_of(model))):
        for extent in (read(owner, "image_size"), read(owner, "img_size")):
            pair = (extent, extent) if type(extent) is int else extent
            if isinstance(pair, tuple | list) and len(pair) == 2 and all(type(each) is int for each in pair):
                return channels, *pair
    return channels, *IMAGE


@dataclass(frozen=True)
class Batch:
    """A batch and its source."""

    value: Any
    source: Literal["given", "made up"] | None
    note: str | None


def resolve(model: Any, given: Any, *, size: int | None = None, sequence: int | None = None) -> Batch:
    """Return the user's batch, a synthetic one, or none."""
    if given is not None:
        return Batch(given, "given", None)
    try:
        value, made_of = synthetic_batch(core(model), size, sequence)
    except Exception as error:  # a model may compute anything in what is read here
        _log.debug("no synthetic batch could be built", exc_info=True)
        why = str(error) if isinstance(error, NoBatchError) else error_in_words(error).rstrip(".")
        return Batch(None, None, f"no synthetic batch could be built: {why}; write example_batch()")
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
    named = [(str(key), tensor) for key, tensor in named_tensors(batch)]
    inputs = [tensor for name, tensor in named if name not in TARGETS and "mask" not in name]
    inputs += [tensor for _, tensor in named]
    tensor = dict(named).get("input_ids", inputs[0] if inputs else None)
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
