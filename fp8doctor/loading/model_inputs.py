"""Read a model's inputs from its forward, configuration and layers."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from fp8doctor.stacks.looking import children_of, home, method, modules_of, read, read_class, tensors_of

_log = logging.getLogger("fp8doctor")

IMAGE = (224, 224)
"""Height and width of images if the model tells none."""

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


def parameters_of(model: Any) -> dict[str, bool]:
    """Return the forward's arguments, and if each is required."""
    try:
        found = list(inspect.signature(read_class(type(model), "forward")).parameters.values())[1:]
    except (TypeError, ValueError):
        return {}
    return {
        each.name: each.default is each.empty
        for each in found
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }


def first_layer(model: Any) -> Any:
    """Return the first embedding (not of positions), convolution or linear layer."""
    for name, module in modules_of(model):
        embeds = isinstance(read(module, "num_embeddings"), int) and not _is_of_positions(name)
        convolves = isinstance(read(module, "in_channels"), int) and isinstance(
            read(module, "kernel_size"), tuple
        )
        if embeds or convolves or isinstance(read(module, "in_features"), int):
            return module
    return None


def made_before(model: Any, first: Any) -> str | None:
    """Name a class of the user's without parameters, like Rearrange, that comes before a layer, or None."""
    for _, module in modules_of(model):
        if module is first:
            break
        own = not home(type(module)).startswith("torch.nn.")
        if own and not children_of(module) and not any(tensors_of(module, "_parameters")):
            return type(module).__name__
    return None


def vocabulary_of(model: Any) -> int:
    """Count the tokens that both input embedding and configuration know."""
    ask = method(model, "get_input_embeddings")
    try:
        embedding = ask() if ask else first_layer(model)
    except Exception:  # transformers raises where a model of several inputs does not name one
        _log.debug("get_input_embeddings raises", exc_info=True)
        embedding = first_layer(model)
    sizes = (read(_text_config(model), "vocab_size"), read(embedding, "num_embeddings"))
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        raise NoBatchError("the model does not tell the size of its vocabulary")
    return min(known)


def longest_sequence(model: Any) -> int | None:
    """Return the longest sequence by configuration, positions or masks, or None."""
    config = _text_config(model)
    found = [next((size for key in POSITION_KEYS if isinstance(size := read(config, key), int)), None)]
    tables = [
        each
        for name, each in modules_of(model)
        if _is_of_positions(name) and isinstance(read(each, "num_embeddings"), int)
    ]
    if read(model, "main_input_name") is not None:
        # RoBERTa and similar models count after the padding: the first positions are no token's.
        found += [
            read(each, "num_embeddings") - read(each, "padding_idx") - 1
            for each in tables
            if read(each, "padding_idx") is not None
        ]
    else:
        found += [read(each, "num_embeddings") for each in tables]
        held = [*tensors_of(model, "_parameters"), *tensors_of(model, "_buffers")]
        found += [
            each.shape[-2]
            for name, each in held
            if each.dim() in (2, 3) and (_is_of_positions(name) or name.rpartition(".")[2] == "pe")
        ]
        found += [
            each.shape[-1]
            for _, each in tensors_of(model, "_buffers")
            if each.dim() >= 2 and each.shape[-1] == each.shape[-2]
        ]
    known = [each for each in found if isinstance(each, int) and each > 0]
    return min(known) if known else None


def _text_config(model: Any) -> Any:
    config = read(model, "config")
    ask = method(config, "get_text_config")
    return ask() if ask else config


def _is_of_positions(name: str) -> bool:
    parts = name.removesuffix(".weight").rpartition(".")[2].lower()
    return any(part in parts for part in POSITION_PARTS)


def attends(model: Any) -> bool:
    return any(
        "attention" in label or "attn" in label
        for name, each in modules_of(model)
        for label in (name.lower(), type(each).__name__.lower())
    )


def image_shape(model: Any, first: Any) -> tuple[int, ...] | None:
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
