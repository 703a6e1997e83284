"""Attention and its KV cache: transformers' settings, and torch's own attention.

Names of transformers 4.53 to 5.23.
"""

import re
from typing import Any

from torch import nn

from fp8doctor.examine.checkpointing import huggingface_flag
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.walk import Place, Tree
from fp8doctor.facts import Attention
from fp8doctor.stacks.looking import (
    class_name,
    forward_of,
    home,
    is_a,
    modules_of,
    read,
    read_class,
    state_of,
)

SOFTCAP = re.compile(r"att.*softcap")
"""Settings that cap attention's logits (Gemma 2's ``attn_logit_softcapping``), which torch's attention
lacks."""

TORCHS_OWN = "scaled_dot_product_attention"

GENERATES = "GenerationMixin"
"""transformers' base class of decoders."""


def examine_attention(tree: Tree) -> tuple[Attention, ...]:
    found: dict[int, Attention] = {}
    asked: set[type] = set()
    for place in tree.places:
        module, config = place.module, state_of(place.module).get("config")
        kind = type(module)
        if (
            PRETRAINED in place.lineage
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
    return any(
        "Attention" in type(module).__name__
        and not is_a(module, nn.MultiheadAttention)
        and state_of(module).get("config", config) is config
        for _, module in modules_of(place.module)
        if module is not place.module
    )


def needs_eager(config: Any) -> str | None:
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
    *_, inner = chain(forward_of(module))
    code = read(read(inner, "__func__", inner), "__code__")
    from_library = home(type(module)).startswith("transformers.")
    return not from_library and code is not None and TORCHS_OWN in code.co_names


def examine_cache(tree: Tree, arguments: Any) -> dict[str, Any]:
    """Return if every training forward builds a KV cache, its switch and its holder, as in `Training`.

    A decoder of transformers builds one if ``config.use_cache`` is on (4.57 to 5.23), unless it checkpoints
    or a Trainer switches it off (5.23). Encoders, encoder-decoders, which drop it with labels, and models
    with a state of their own (Mamba) build none. None without a decoder.
    """
    models = [place for place in tree.places if PRETRAINED in place.lineage]
    configs = {id(place): read(place.module, "config") for place in models}
    decoders = [place for place in models if any(name == GENERATES for _, name in place.lineage)]
    makers = [
        place
        for place in models
        if decoders
        and not read_class(type(place.module), "_is_stateful")
        and read(configs[id(place)], "is_encoder_decoder") is not True
    ]
    if not any(place in makers for place in decoders):
        return {"use_cache": None, "cache_switch": None, "cache_holder": None}
    settings = state_of(arguments)
    off = settings.get("use_cache") is False
    checkpointed = settings.get("gradient_checkpointing") or settings.get("activation_checkpointing")
    asking = [place for place in makers if read(configs[id(place)], "use_cache") is True]
    flagged = any(huggingface_flag(place.module) for place in tree.places)
    switch = asking[0].name if asking and not off else None
    return {
        "use_cache": bool(asking) and not (off or checkpointed or flagged),
        "cache_switch": switch,
        "cache_holder": None if switch is None else asking[-1].name,
    }
