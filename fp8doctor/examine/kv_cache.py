"""Whether a transformers model builds a KV cache in its training forward, where nobody reads it.

Read from the model's own code and configuration, transformers 4.57 to 5.23: a forward that makes one names a
class of ``transformers.cache_utils`` and is steered by its module's ``config.use_cache``. What switches it
off:

- a decoder that is used as an encoder (BERT, the encoder of T5) asks ``is_decoder``;
- a forward that asks ``training`` first (Mamba, T5Gemma) makes none in training, unless it asks for the sake
  of checkpointing;
- BART and its kin drop it when they are given labels;
- checkpointing: the model's forward or its decorator sets ``use_cache`` to False, and from 4.53 on the layer
  drops the cache;
- a Trainer sets ``config.use_cache`` to its argument of that name, False by default (5.23; 4.57 has no such
  argument).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8doctor.examine.checkpointing import huggingface_flag
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.walk import Place, Tree
from fp8doctor.stacks.looking import forward_of, read, state_of

CACHES = "transformers.cache_utils"

DROPPED = "`use_cache` argument is changed to `False` since `labels`"
"""What BART and its kin say when they drop the cache."""


def use_cache(tree: Tree, arguments: Any) -> bool | None:
    """Whether a module of the tree builds a cache in every training forward; None when none of them can.

    ``arguments`` are those of a Trainer, or None.
    """
    models = [place.module for place in tree.places if PRETRAINED in place.kind.lineage]
    makers = [place for place in tree.places if place.module in models and makes_cache(place.module)]
    if not makers:
        return None
    settings = state_of(arguments)
    off = (
        settings.get("use_cache") is False
        or settings.get("gradient_checkpointing")
        or settings.get("activation_checkpointing")
    )
    if off or any(drops_cache(module) for module in models):
        return False
    asked = {id(place): read(read(place.module, "config"), "use_cache") is True for place in makers}
    return any(
        asked[id(place)]
        and not huggingface_flag(place.module)
        and all(asked.get(id(above), True) for above in above_of(place))
        for place in makers
    )


def above_of(place: Place) -> Iterator[Place]:
    """List the places that a place is in. A model that makes a cache hands its own answer down to those in
    it."""
    while place.parent is not None:
        place = place.parent
        yield place


def cache_holder(tree: Tree, switch: str | None) -> str | None:
    """Name of the innermost module that makes the cache which ``switch`` asks for: its blocks fill it."""
    if switch is None:
        return None
    below = f"{switch}." if switch else ""
    makers = [
        place.name
        for place in tree.places
        if PRETRAINED in place.kind.lineage
        and (place.name == switch or place.name.startswith(below))
        and makes_cache(place.module)
    ]
    return max(makers, key=lambda name: name.count(".") + bool(name), default=switch)


def cache_switch(tree: Tree, arguments: Any) -> str | None:
    """Name of the outermost module with the configuration that asks for a cache, which checkpointing may hold
    off; None when none asks."""
    models = [place for place in tree.places if PRETRAINED in place.kind.lineage]
    if read(arguments, "use_cache") is False or any(drops_cache(place.module) for place in models):
        return None
    configs = [
        read(place.module, "config")
        for place in models
        if makes_cache(place.module) and read(read(place.module, "config"), "use_cache") is True
    ]
    return next(
        (place.name for place in models if any(read(place.module, "config") is config for config in configs)),
        None,
    )


def makes_cache(module: nn.Module) -> bool:
    """Whether the forward of this very module makes a cache in training when it is asked to."""
    function = own_forward(module)
    names = list(function.__code__.co_names) if function else []  # in the order of their first use
    cache = next(
        (
            place
            for place, name in enumerate(names)
            if read(function.__globals__.get(name), "__module__") == CACHES
        ),
        None,
    )
    if cache is None:
        return False
    if "is_decoder" in names and not state_of(module).get(
        "is_decoder", read(read(module, "config"), "is_decoder", False)
    ):
        return False
    before = names[:cache]
    return "training" not in before or "gradient_checkpointing" in before[: before.index("training")]


def drops_cache(module: nn.Module) -> bool:
    """Whether the forward of this very module drops the cache when it is given labels."""
    function = own_forward(module)
    return function is not None and any(
        isinstance(each, str) and DROPPED in each for each in function.__code__.co_consts
    )


def own_forward(module: nn.Module) -> Any:
    """Find the function inside all wrappers of a module's forward; None when it is none of Python's."""
    *_, last = chain(forward_of(module))
    last = read(last, "__func__", last)
    return last if read(last, "__code__") is not None else None
