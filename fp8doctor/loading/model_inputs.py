"""What a model says of its inputs, in its forward, its configuration and its layers."""

from __future__ import annotations

import inspect
from typing import Any

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


class NoBatchError(Exception):
    """No batch can be made up; the message says why."""


def parameters_of(model: Any) -> dict[str, bool]:
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


def first_layer(model: Any) -> Any:
    """Find the first embedding (positions aside), convolution or linear layer in the order of definition."""
    for name, module in model.named_modules():
        embeds = isinstance(getattr(module, "num_embeddings", None), int) and not _is_of_positions(name)
        convolves = isinstance(getattr(module, "in_channels", None), int) and isinstance(
            getattr(module, "kernel_size", None), tuple
        )
        if embeds or convolves or isinstance(getattr(module, "in_features", None), int):
            return module
    return None


def vocabulary_of(model: Any) -> int:
    """Tokens that the input embedding and the configuration both know."""
    embedding = model.get_input_embeddings() if hasattr(model, "main_input_name") else first_layer(model)
    sizes = (getattr(_text_config(model), "vocab_size", None), getattr(embedding, "num_embeddings", None))
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    if not known:
        raise NoBatchError("the model does not tell the size of its vocabulary")
    return min(known)


def longest_sequence(model: Any) -> int | None:
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


def attends(model: Any) -> bool:
    return any(
        "attention" in label or "attn" in label
        for name, each in model.named_modules()
        for label in (name.lower(), type(each).__name__.lower())
    )


def image_size(model: Any) -> tuple[int, ...] | None:
    """What the model, its configuration or its patch embedding keep as the size of an image."""
    for owner in (getattr(model, "config", None), *model.modules()):
        for key in ("image_size", "img_size"):
            if extents := as_pair(getattr(owner, key, None)):
                return extents
    return None


def patch_rows(model: Any, height: int, width: int) -> int | None:
    """Count a vision transformer's rows for one image, patches and added tokens; None for others.

    Models of several stages (Swin, ConvNeXt) merge patches on the way: their rows are not one number.
    """
    first = first_layer(model)
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


def as_pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(each, int) for each in value):
        return value[0], value[1]
    return None
