"""Resolve the batch of a step: the user's, or a random one: tokens, images or rows of a Linear.

A random batch is on the model's device (also meta) and leaves global random states alone.
"""

import inspect
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from fp8doctor.facts import Target, Workload
from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import (
    buffers_of,
    children_of,
    home,
    modules_of,
    parameters_of,
    read,
    read_class,
    tensors_of,
)
from fp8doctor.stacks.tensors import named_tensors
from fp8doctor.stacks.torch_private import wrapped_child
from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")

BATCH, SEQUENCE = 8, 2048
IMAGE = (224, 224)
"""Default sizes of a synthetic batch."""

IDS = ("input_ids", "labels")
"""Ends of the names of token ids; labels may be one longer, if they are shifted."""

TARGETS = ("labels", "targets", "target")
"""Arguments that take the tokens to predict."""

NEEDED = ("timestep", "timesteps", "decoder_input_values")
"""Arguments that a model needs, even with a default."""

IMAGES = ("img", "imgs", "image", "images", "pixel_values", "video", "videos", "latent", "latents", "sample")
"""First arguments that are no rows of a Linear."""

POSITION_KEYS = (
    "max_position_embeddings n_positions max_target_positions max_seq_len max_seq_length context_length "
    "n_ctx block_size"
).split()
"""Settings with the longest sequence; the first counts, because BigBird's ``block_size`` is another."""


class NoBatchError(Exception):
    """No batch can be made; the message says why."""


def synthetic_batch(model: Any, size: int | None, sequence: int | None) -> tuple[Any, str]:
    """Make a batch and describe it. Raises `NoBatchError`."""
    first, config = first_layer(model), _text_config(model)
    arguments = dict([*arguments_of(read_class(type(model), "forward")).items()][1:])
    kind = None if config is None else read(model, "main_input_name")
    main = kind or next(iter(arguments), "")
    for name, required in arguments.items():
        if name != main and (name in NEEDED or (required and name not in TARGETS)):
            raise NoBatchError(f"forward also needs {name!r}")
    if kind == "input_ids" or (kind is None and read(first, "num_embeddings") is not None):
        batch, what = _tokens(model, arguments, main, size or BATCH, sequence)
    elif (
        kind in (None, "pixel_values")
        and "input_ids" not in arguments
        and (image := _image_shape(model, first))
    ):
        batch, what = {main: _random(model, (size or BATCH, *image))}, "random pixels"
    elif kind is None and main not in IMAGES and (width := _width_of_rows(model, first, sequence)):
        shape = (size or BATCH, sequence, width) if sequence else (size or BATCH * SEQUENCE, width)
        batch = {main: _random(model, shape)}
        what = f"random numbers, for a first {type(first).__name__} of {width} inputs"
    else:
        what = f"the inputs of {type(model).__name__}"
        raise NoBatchError(f"{what} are not known to be tokens, images or rows of a Linear")
    described = f"{' x '.join(map(str, batch[main].shape))} {what}"
    return batch[main] if kind is None and len(batch) == 1 else batch, described


def _tokens(
    model: Any, arguments: Mapping[str, bool], main: str, size: int, sequence: int | None
) -> tuple[dict[str, Any], str]:
    """Draw tokens for a forward with these arguments, as its targets too if it learns from tokens."""
    targets = [name for name in TARGETS if name in arguments]
    media = {"pixel_values": "images", "input_features": "sound"}  # not needed to predict tokens
    besides = [what for name, what in media.items() if name in arguments]
    if besides and not targets:
        raise NoBatchError(f"forward takes text and {besides[0]}")
    sizes = (read(_text_config(model), "vocab_size"), read(first_layer(model), "num_embeddings"))
    vocabulary = min((each for each in sizes if isinstance(each, int) and each > 0), default=None)
    if vocabulary is None:
        raise NoBatchError("the model does not tell the size of its vocabulary")
    length = sequence or min(SEQUENCE, longest_sequence(model) or SEQUENCE)
    value = _random(model, (size, length), vocabulary)
    others = ("Classification", "ForMultipleChoice", "ForNextSentence")  # their labels are no tokens
    learns = [] if any(each in type(model).__name__ for each in others) else targets
    decoder = [name for name in arguments if name == "decoder_input_ids"]
    what = ", no ".join([f"random tokens of a vocabulary of {vocabulary}", *besides])
    return {main: value, **dict.fromkeys(learns or decoder, value)}, what


def _random(model: Any, shape: tuple[int, ...], below: int | None = None) -> Any:
    """Draw token ids ``below`` a number, else numbers in the model's dtype, on its device."""
    import torch

    parameters = [each for _, each in tensors_of(model, "_parameters")]
    device, wide = parameters[0].device, (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    dtype = next((each.dtype for each in parameters if each.dtype in wide), torch.bfloat16)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype if below is None else torch.int64, device="meta")
    generator = torch.Generator("cpu").manual_seed(0)
    if below is not None:
        return torch.randint(below, shape, generator=generator, device="cpu").to(device)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)


def first_layer(model: Any) -> Any:
    """Return the first embedding (of no positions), convolution or Linear, or None."""
    for name, module in modules_of(model):
        embeds = isinstance(read(module, "num_embeddings"), int) and not _is_of_positions(name)
        convolves = type(read(module, "in_channels")) is int and type(read(module, "kernel_size")) is tuple
        if embeds or convolves or isinstance(read(module, "in_features"), int):
            return module
    return None


def _width_of_rows(model: Any, first: Any, sequence: int | None) -> int | None:
    """Return the features of a Linear that the model begins with, or None. Raises `NoBatchError`."""
    width = read(first, "in_features")
    if type(width) is not int or width < 1:
        return None
    if (begins := next(each for _, each in modules_of(model) if not children_of(each))) is not first:
        raise NoBatchError(f"{type(begins).__name__} makes the inputs of the first {type(first).__name__}")
    labels = (f"{name} {type(each).__name__}".lower() for name, each in modules_of(model))
    if sequence is None and any("attention" in label or "attn" in label for label in labels):
        raise NoBatchError("the model attends, and the length of its sequences is not known")
    return width


def longest_sequence(model: Any) -> int | None:
    config = _text_config(model)
    found = [next((size for key in POSITION_KEYS if isinstance(size := read(config, key), int)), 0)]
    for name, module in modules_of(model):
        if config is not None and read(module, "num_embeddings") is None:
            continue
        for key, table in (parameters_of(module) | buffers_of(module)).items():
            if table.dim() in (2, 3) and _is_of_positions(f"{name}.{key}"):
                # RoBERTa and similar models count after the padding: the first positions are no token's.
                padding = read(module, "padding_idx")
                found.append(table.shape[-2] - (0 if padding is None else padding + 1))
    return min((each for each in found if each > 0), default=None)


def _text_config(model: Any) -> Any:
    config = read(model, "config")
    return read(config, "text_config", config)


def _is_of_positions(name: str) -> bool:
    """Tell by its name if this is a position embedding or a rotary table."""
    last = name.removesuffix(".weight").rpartition(".")[2].lower()
    return any(part in last for part in ("pos", "wpe", "freqs_cis"))


def _image_shape(model: Any, first: Any) -> tuple[int, ...] | None:
    """Return channels, height and width of the images that a model takes, or None.

    By timm's configuration, else by that of transformers, else by a first Conv2d.
    """
    declared = read(model, "pretrained_cfg")
    size = declared.get("input_size") if isinstance(declared, dict) else read(declared, "input_size")
    if isinstance(size, tuple | list) and len(size) == 3:
        return tuple(size)
    config = read(model, "config")
    config = read(config, "vision_config", config)
    channels = read(first, "in_channels", read(config, "num_channels"))
    flat = len(read(first, "kernel_size", (0, 0))) == 2
    if type(channels) is not int or not flat or read(config, "num_frames") is not None:
        return None
    owners = (config, *(each for _, each in modules_of(model)))
    sides = (read(owner, name) for owner in owners for name in ("image_size", "img_size"))
    side = next(filter(None, sides), IMAGE)
    return channels, *((side, side) if type(side) is int else side)


def job_of(
    model: Any,
    target: Target,
    given: Any = None,
    *,
    size: int | None = None,
    sequence: int | None = None,
    why_none: str = "",
    accumulate: int = 1,
    **parts: Any,
) -> Job:
    """Make a job of the user's batch, or of a synthetic one unless ``why_none`` says why there is no batch.

    ``parts`` are the user's own, as in `Job`.
    """
    source: Literal["given", "made up"] | None = None if given is None else "given"
    batch, note = given, why_none or None
    if given is None and not why_none:
        try:
            batch, made_of = synthetic_batch(core(model), size, sequence)
            source, note = "made up", f"synthetic: {made_of}"
        except Exception as error:  # a model may compute anything in what is read here
            _log.debug("no synthetic batch could be built", exc_info=True)
            why = str(error) if isinstance(error, NoBatchError) else error_in_words(error).rstrip(".")
            note = f"no synthetic batch could be built: {why}; write example_batch()"
    try:
        rows, length, tokens = extent(core(model), batch)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # nested tensors have no shape
        rows = length = tokens = None
    own_loss = parts.get("loss") or parts.get("training_step")
    has_labels = isinstance(batch, Mapping) and "labels" in batch
    workload = Workload(
        batch_source=source,
        batch_size=rows,
        sequence_length=length,
        tokens=tokens,
        note=note,
        loss_source="given" if own_loss else "output.loss" if has_labels else "mean",
        optimizer_source="made up" if parts.get("optimizer") is None else "given",
        autocast_source="none" if parts.get("autocast") is None else "given",
        accumulate=accumulate,
    )
    return Job(model=model, target=target, workload=workload, batch=batch, **parts)


def core(model: Any) -> Any:
    """Return the model inside its wrappers, and inside PEFT's."""
    while True:
        inner = wrapped_child(model)
        if inner is None and home(type(model)).startswith("peft."):
            held = children_of(model)
            inner = held.get("base_model", held.get("model"))
        if inner is None:
            return model
        model = inner


def extent(model: Any, batch: Any) -> tuple[int | None, int | None, int | None]:
    """Return batch size, sequence length and matmul rows (tokens) of a batch.

    Without rows if inputs are of unlike sizes, as of two encoders, or nodes and edges: layers see others.
    """
    each_named = named_tensors(batch)  # of nested tensors the rows of all samples
    named = [(str(name), each.values() if each.is_nested else each) for name, each in each_named]
    named.sort(key=lambda pair: (pair[0] != "input_ids", pair[0] in TARGETS or "mask" in pair[0]))
    if not named:
        return None, None, None
    main, tensor = named[0]
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        ends = IDS if main == "input_ids" else ""
        ids = [each for name, each in named if name.endswith(ends) and "mask" not in name and each.dim() > 1]
        sides = [each.shape[-1] for each in ids if not each.is_floating_point() and each.element_size() > 1]
        tokens = None if sides and max(sides) > min(sides) + 1 else tensor.numel()
        return (None, None, tokens) if len(shape) < 2 else (shape[0], shape[-1], tokens)
    first = first_layer(model)
    width, convolves = read(first, "in_features"), read(first, "in_channels") is not None
    if shape[-1:] != (width,) and (len(shape) > 3 or convolves or isinstance(width, int)):
        return shape[0] if shape else None, None, None  # images, sound: the rows depend on the model's code
    leading = shape[:-1]
    size, length, rows = (*leading, 1)[0], leading[1] if len(leading) == 2 else None, math.prod(leading)
    others = [each.shape for name, each in named if name not in TARGETS and each.is_floating_point()]
    more = any(1 < len(each) < 4 and math.prod(each[:-1]) > rows for each in others)
    return size, length, None if more else rows


def arguments_of(function: Any) -> dict[str, bool]:
    """Map a function's named arguments to whether it requires them; empty if nobody can tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return {}
    named = (each for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    return {each.name: each.default is each.empty for each in named}
