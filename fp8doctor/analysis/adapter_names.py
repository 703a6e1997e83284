"""How the filter of a conversion names layers, before LoRA wraps them and after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fp8doctor.facts import Linear, recorded

BASE = ".base_layer"
"""What PEFT appends to the name of a layer that it wraps."""
ROOT = "base_model.model."
"""What PEFT puts before the name of every layer, in a model that it wraps whole."""
COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""What PEFT appends to the name of a layer that it trains whole, of which it calls a copy."""
OF_LORA = "lora_"
"""What the names of LoRA's matrices hold, in PEFT and torchtune."""


def before_wrapping(names: Iterable[str], linears: Sequence[Linear]) -> list[str]:
    """Name layers as they are called before LoRA, a layer that is trained whole by its names of now too.

    LoRA's own matrices, which `kept_out` leaves out, are left out.
    """
    if not has_lora(linears):
        return list(names)
    plain = [name.replace(BASE, "").removeprefix(ROOT) for name in names if OF_LORA not in name]
    return list(dict.fromkeys(each for name in plain for each in (COPY.sub("", name), name)))


def kept_out(linears: Sequence[Linear]) -> str:
    """Write the condition under which a filter takes a layer that is not in ``keep``."""
    if not has_lora(linears):
        return "name not in keep"
    root = f'.removeprefix("{ROOT}")' if any(each.name.startswith(ROOT) for each in linears) else ""
    return f'"{OF_LORA}" not in name and name.replace("{BASE}", ""){root} not in keep'


def has_lora(linears: Iterable[Linear]) -> bool:
    """Whether layers are wrapped by LoRA's matrices under names that tell them apart."""
    return any(
        recorded(each, "adapter") and each.adapter == "adapter" and OF_LORA in each.name for each in linears
    )
