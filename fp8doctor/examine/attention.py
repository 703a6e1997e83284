"""Attention and its KV cache: transformers' settings, and torch's own attention.

Names of transformers 4.53 to 5.23.
"""

import re
from typing import Any

from torch import nn

from fp8doctor.examine.linears import PRETRAINED
from fp8doctor.examine.marks import chain, huggingface_flag
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


def examine_attention(tree: Tree) -> tuple[Attention, ...]:
    found: dict[int, Attention] = {}
    asked: set[type] = set()
    for place in tree.places:
        module, config = place.module, state_of(place.module).get("config")
        kind, implementation = type(module), read(config, "_attn_implementation")
        known = {"name": place.name, "kind": class_name(kind)}
        if (
            isinstance(implementation, str)
            and PRETRAINED in place.lineage
            and id(config) not in found
            and is_followed(place, config)
        ):
            has_sdpa = read_class(kind, "_supports_sdpa")
            found[id(config)] = Attention(
                implementation=implementation,
                has_sdpa=has_sdpa if isinstance(has_sdpa, bool) else None,
                needs_eager=needs_eager(config),
                **known,
            )
        elif kind not in asked and calls_torchs_own(module):
            found[id(kind)] = Attention(implementation="sdpa", has_sdpa=True, needs_eager=None, **known)
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
    """Name a setting that torch's attention lacks, such as Gemma 2's ``attn_logit_softcapping``."""
    if read(config, "output_attentions") is True:
        return "output_attentions=True"
    caps = ((name, value) for name, value in state_of(config).items() if re.search(r"att.*softcap", name))
    return next((f"{name}={value}" for name, value in caps if value is not None), None)


def calls_torchs_own(module: nn.Module) -> bool:
    """Tell if a module's own forward names torch's attention, outside transformers."""
    if is_a(module, nn.MultiheadAttention):
        return True
    *_, inner = chain(forward_of(module))
    names = getattr(read(read(inner, "__func__", inner), "__code__"), "co_names", ())
    return "scaled_dot_product_attention" in names and not home(type(module)).startswith("transformers.")


def examine_cache(tree: Tree, arguments: Any) -> dict[str, Any]:
    """Return if every training forward builds a KV cache, its switch and its holder, as in `Training`.

    A decoder of transformers builds one if ``config.use_cache`` is on (4.57 to 5.23), unless it checkpoints
    or a Trainer switches it off (5.23). Encoders, encoder-decoders, which drop it with labels, and models
    with a state of their own (Mamba) build none. None without a decoder.
    """
    models = [place for place in tree.places if PRETRAINED in place.lineage]
    decoders = [place for place in models if any(name == "GenerationMixin" for _, name in place.lineage)]
    makers = [
        place
        for place in models
        if not read_class(type(place.module), "_is_stateful")
        and read(read(place.module, "config"), "is_encoder_decoder") is not True
    ]
    if not any(place in makers for place in decoders):
        return {"use_cache": None, "cache_switch": None, "cache_holder": None}
    settings = state_of(arguments)
    off = settings.get("use_cache") is False
    checkpointed = settings.get("gradient_checkpointing") or settings.get("activation_checkpointing")
    asking = [each.name for each in makers if read(read(each.module, "config"), "use_cache") is True]
    flagged = any(huggingface_flag(place.module) for place in tree.places)
    in_force = bool(asking) and not off
    return {
        "use_cache": in_force and not (checkpointed or flagged),
        "cache_switch": asking[0] if in_force else None,
        "cache_holder": asking[-1] if in_force else None,
    }
