"""Read a model's inputs from its forward, configuration and layers."""

from __future__ import annotations

import inspect
from typing import Any

from fp8doctor.stacks.looking import children_of, home, is_a, method, modules_of, read, read_class, tensors_of

MORE_ROWS = 8
"""Most rows that a vision transformer adds to its patches: class, distillation, registers."""

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


def vocabulary_of(model: Any) -> int:
    """Count the tokens that both input embedding and configuration know."""
    ask = method(model, "get_input_embeddings")
    embedding = ask() if ask else first_layer(model)
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


def image_size(model: Any) -> tuple[int, ...] | None:
    """Return the image size in the model, its configuration or patch embedding."""
    for owner in (read(model, "config"), *(each for _, each in modules_of(model))):
        for key in ("image_size", "img_size"):
            if extents := as_pair(read(owner, key)):
                return extents
    image = declared_image(model)
    return image and image[1:]


def declared_image(model: Any) -> tuple[int, ...] | None:
    """Return channels and extents of the images that a timm model declares."""
    declared = read(model, "pretrained_cfg", read(model, "default_cfg"))
    size = declared.get("input_size") if isinstance(declared, dict) else read(declared, "input_size")
    if not isinstance(size, tuple | list) or len(size) != 3 or not all(type(each) is int for each in size):
        return None
    return tuple(size)


def made_before(model: Any, first: Any) -> Any:
    """Return a parameter-free module, like Rearrange, before a layer, or None."""
    import torch

    for _, module in modules_of(model):
        parts = list(children_of(module).values()) if is_a(module, torch.nn.Sequential) else []
        for number, part in enumerate(parts):
            if part is first:
                return next((each for each in parts[:number] if each is not None and _makes(each)), None)
    return None


def _makes(module: Any) -> bool:
    return not home(type(module)).startswith("torch.nn.") and not any(tensors_of(module, "_parameters"))


def patch_rows(model: Any, height: int, width: int) -> int | None:
    """Count a vision transformer's rows per image, or return None.

    Models with stages (Swin, ConvNeXt) merge patches: their rows are not one number.
    """
    first = first_layer(model)
    stride = read(first, "stride")
    if read(first, "kernel_size") != stride or stride[0] < 2:
        return None
    patches: int = (height // stride[0]) * (width // stride[1])
    held = [
        each.shape[-2]
        for name, each in tensors_of(model, "_parameters")
        if _is_of_positions(name) and each.dim() in (2, 3)
    ]
    known = next((rows for rows in held if patches <= rows <= patches + MORE_ROWS), None)
    return known if known is not None or not _keeps_its_width(model, read(first, "out_channels")) else patches


def _keeps_its_width(model: Any, width: int) -> bool:
    """Tell if every linear layer starts from or ends at this width."""
    sides = [
        (read(each, "in_features"), read(each, "out_features"))
        for _, each in modules_of(model)
        if isinstance(read(each, "in_features"), int)
    ]
    return all(width in side for side in sides)


def as_pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return value[0], value[1]
    return None
