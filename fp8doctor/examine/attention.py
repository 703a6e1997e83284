"""How attention is computed: transformers' configurations, calls of torch's own, and the backends that torch
may use for it.

Names of transformers 4.53 to 5.23. A mask, the head size and the dtype decide in every call again which of
torch's backends takes it; from outside only those that are switched off can be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fp8doctor.examine.kv_cache import own_forward
from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.walk import Place, Tree
from fp8doctor.facts import Attention
from fp8doctor.stacks.looking import class_name, home, is_a, read, read_class, state_of

BACKENDS = ("flash", "mem_efficient", "cudnn", "math")
"""``torch.backends.cuda.NAME_sdp_enabled()``, torch 2.6 to 2.15."""

SOFTCAP = re.compile(r"att.*softcap")
"""Settings that cap attention's logits, such as Gemma 2's ``attn_logit_softcapping``: torch's fused attention
has no such step."""

TORCHS_OWN = "scaled_dot_product_attention"


def examine_attention(tree: Tree) -> tuple[Attention, ...]:
    """List configurations that attention modules follow, and classes that call torch's own attention."""
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
    """Whether an attention module below has this configuration, or none of its own."""
    attention = (
        module
        for module in below(place)
        if "Attention" in type(module).__name__ and not is_a(module, nn.MultiheadAttention)
    )
    return any(state_of(module).get("config", config) is config for module in attention)


def below(place: Place) -> Iterator[nn.Module]:
    """List the modules below a place."""
    for child in place.children:
        yield child.module
        yield from below(child)


def needs_eager(config: Any) -> str | None:
    """Find the setting for which eager attention is needed, as a user would write it."""
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
    """Whether this module's own forward names torch's attention, outside transformers."""
    if is_a(module, nn.MultiheadAttention):
        return True
    function = None if home(type(module)).startswith("transformers.") else own_forward(module)
    return function is not None and TORCHS_OWN in function.__code__.co_names


def sdp_backends() -> tuple[str, ...]:
    """List the backends that are switched on in this process."""
    return tuple(name for name in BACKENDS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())
