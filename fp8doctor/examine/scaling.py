"""How the FP8 layers scale: the dtypes of the forward, and the history of delayed scaling.

A Float8LinearConfig is torchao's public configuration (0.10 to 0.18); a Transformer Engine module keeps the recipe of its
last FP8 forward in ``fp8_meta`` (1.0 to 2.20). What carries neither is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from torch import nn

from fp8doctor.examine.walk import Tree
from fp8doctor.facts import Scaling
from fp8doctor.stacks.lineage import ancestor

FORWARD_OF_FORMAT = {"E4M3": "float8_e4m3fn", "HYBRID": "float8_e4m3fn", "E5M2": "float8_e5m2"}
"""Dtype of the forward by the name of Transformer Engine's ``Format``. Source: ``transformer_engine/common/recipe``, 2.20."""


def examine_scaling(tree: Tree) -> tuple[Scaling, ...]:
    """Every way of scaling in the model, with the number of its layers and the first of them."""
    found: dict[Scaling, list[str]] = {}
    for place in tree.places:
        for scaling in (*_of_torchao(place.module), *_of_transformer_engine(place.module)):
            found.setdefault(scaling, []).append(place.name)
    return tuple(msgspec.structs.replace(scaling, layers=len(names), first=names[0]) for scaling, names in found.items())


def _of_torchao(module: nn.Module) -> Iterator[Scaling]:
    config: Any = vars(module).get("config")
    if config is None or ancestor(type(module), "torchao.", ("Float8Linear", "Float8LinearNoCompile")) is None:
        return
    casts = [getattr(config, name, None) for name in ("cast_config_input", "cast_config_weight")]
    dtypes = dict.fromkeys(str(getattr(cast, "target_dtype", None)).removeprefix("torch.") for cast in casts)
    forward = tuple(dtype for dtype in dtypes if dtype.startswith("float8"))
    yield Scaling(stack="torchao", forward_dtypes=forward, amax_history_len=None, amax_compute_algo=None)


def _of_transformer_engine(module: nn.Module) -> Iterator[Scaling]:
    meta = vars(module).get("fp8_meta")
    recipe = meta.get("recipe") if isinstance(meta, dict) else None
    if recipe is None:
        return
    dtype = FORWARD_OF_FORMAT.get(getattr(getattr(recipe, "fp8_format", None), "name", ""))
    history = getattr(recipe, "amax_history_len", None)
    algorithm = getattr(recipe, "amax_compute_algo", None)
    yield Scaling(
        stack="transformer_engine",
        forward_dtypes=(dtype,) if dtype else (),
        amax_history_len=history if isinstance(history, int) else None,
        amax_compute_algo=algorithm if isinstance(algorithm, str) else "custom" if callable(algorithm) else None,
    )
