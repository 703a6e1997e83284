"""Attention and its KV cache: transformers' settings, and torch's own attention.

Names of transformers 4.53 to 5.23. Masks, head size and dtype choose torch's backend in each call; from
outside only disabled backends show.

A transformers model may build a KV cache in training that nothing reads. Its forward names a class of
``transformers.cache_utils`` and checks ``config.use_cache`` (4.57 to 5.23). No cache is built if:

- a decoder used as an encoder (BERT, T5's encoder) checks ``is_decoder``;

- the forward checks ``training`` first (Mamba, T5Gemma), except for checkpointing;

- BART and its relatives get labels;

- checkpointing sets ``use_cache`` to False, or from 4.53 the layer drops the cache;

- a Trainer sets ``config.use_cache`` to its argument, False by default (5.23; 4.57 has none).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fp8doctor.examine.checkpointing import huggingface_flag
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.walk import Place, Tree
from fp8doctor.facts import Attention
from fp8doctor.stacks.looking import class_name, forward_of, home, is_a, read, read_class, state_of

BACKENDS = ("flash", "mem_efficient", "cudnn", "math")
"""Names in ``torch.backends.cuda.NAME_sdp_enabled()`` (2.6 to 2.15)."""

SOFTCAP = re.compile(r"att.*softcap")
"""Settings that cap attention's logits (Gemma 2's ``attn_logit_softcapping``), which torch's attention
lacks."""

TORCHS_OWN = "scaled_dot_product_attention"


def examine_attention(tree: Tree) -> tuple[Attention, ...]:
    """List attention configurations, and classes that call torch's own attention."""
    found: dict[int, Attention] = {}
    asked: set[type] = set()
    for place in tree.places:
        module, config = place.module, state_of(place.module).get("config")
        kind = type(module)
        if (
            PRETRAINED in place.kind.lineage
            and id(config) not in found
            and isinstance(implementation := read(config, "_attn_implementation"), str)
            and is_followed(place, config)
        ):
            has_sdpa = read_class(kind, "_supports_sdpa")
            has_sdpa = has_sdpa if isinstance(has_sdpa, bool) else None
            found[id(config)] = Attention(
                name=place.name,
                kind=class_name(kind),
                implementation=implementation,
                has_sdpa=has_sdpa,
                needs_eager=needs_eager(config),
            )
        elif kind not in asked and calls_torchs_own(module):
            found[id(kind)] = Attention(
                name=place.name, kind=class_name(kind), implementation="sdpa", has_sdpa=True, needs_eager=None
            )
        asked.add(kind)
    return tuple(found.values())


def is_followed(place: Place, config: Any) -> bool:
    """Tell if an attention module below has this configuration, or none."""
    attention = (
        module
        for module in below(place)
        if "Attention" in type(module).__name__ and not is_a(module, nn.MultiheadAttention)
    )
    return any(state_of(module).get("config", config) is config for module in attention)


def below(place: Place) -> Iterator[nn.Module]:
    for child in place.children:
        yield child.module
        yield from below(child)


def needs_eager(config: Any) -> str | None:
    """Return the setting that needs eager attention, as a user writes it."""
    if read(config, "output_attentions") is True:
        return "output_attentions=True"
    return next(
        (
            f"{name}={value}"
            for name, value in state_of(config).items()
            if SOFTCAP.search(name) and value is not None
        ),
        None,
    )


def calls_torchs_own(module: nn.Module) -> bool:
    """Tell if a module's own forward names torch's attention, outside transformers."""
    if is_a(module, nn.MultiheadAttention):
        return True
    function = None if home(type(module)).startswith("transformers.") else own_forward(module)
    return function is not None and TORCHS_OWN in function.__code__.co_names


def sdp_backends() -> tuple[str, ...]:
    return tuple(name for name in BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


CACHES = "transformers.cache_utils"

DROPPED = "`use_cache` argument is changed to `False` since `labels`"
"""Warning of BART and its relatives when they drop the cache."""


def examine_cache(tree: Tree, arguments: Any) -> dict[str, Any]:
    """Return if every training forward builds a cache, its switch and its holder, as `Training` names them.

    ``use_cache`` is None if no module can build one. A model that builds one passes its setting down.
    """
    models = [place for place in tree.places if PRETRAINED in place.kind.lineage]
    makers = [place for place in models if makes_cache(place.module)]
    configs = {id(place): read(place.module, "config") for place in models}
    asked = {id(place): read(configs[id(place)], "use_cache") is True for place in makers}
    settings = state_of(arguments)
    off = settings.get("use_cache") is False or any(drops_cache(place.module) for place in models)
    checkpointed = settings.get("gradient_checkpointing") or settings.get("activation_checkpointing")
    builds = any(
        asked[id(place)]
        and not huggingface_flag(place.module)
        and all(asked.get(id(above), True) for above in above_of(place))
        for place in makers
    )
    asking = {id(configs[id(place)]) for place in makers if asked[id(place)] and not off}
    switch = next((place.name for place in models if id(configs[id(place)]) in asking), None)
    below = f"{switch}." if switch else ""
    inside = [place.name for place in makers if place.name == switch or place.name.startswith(below)]
    holder = max(inside, key=lambda name: name.count(".") + bool(name), default=switch)
    return {
        "use_cache": builds and not (off or checkpointed) if makers else None,
        "cache_switch": switch,
        "cache_holder": None if switch is None else holder,
    }


def above_of(place: Place) -> Iterator[Place]:
    while place.parent is not None:
        place = place.parent
        yield place


def makes_cache(module: nn.Module) -> bool:
    """Tell if a module's own forward builds a cache in training when asked."""
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
    """Tell if a module's own forward drops the cache when it gets labels."""
    function = own_forward(module)
    return function is not None and any(
        isinstance(each, str) and DROPPED in each for each in function.__code__.co_consts
    )


def own_forward(module: nn.Module) -> Any:
    """Return the Python function inside all wrappers of a forward, or None."""
    *_, last = chain(forward_of(module))
    last = read(last, "__func__", last)
    return last if read(last, "__code__") is not None else None
