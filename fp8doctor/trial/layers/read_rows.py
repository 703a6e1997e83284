"""The rows that are multiplied by the weight of a layer that is not called itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8doctor.stacks.held_tensors import tensors

OF_ATTENTION = inspect.signature(functional.multi_head_attention_forward)


class ReadRows(TorchFunctionMode):
    """Notes the rows of every ``functional.linear``, and of the output projection that torch's attention
    reads, while it is on, by the weight."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self._rows: dict[int, list[int]] = {id(layer._parameters.get("weight")): [] for layer in layers}

    def of(self, layer: nn.Module) -> list[int]:
        """Return the rows of its weight, product by product."""
        weight = layer._parameters.get("weight")
        return [] if weight is None else self._rows[id(weight)]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.multi_head_attention_forward:
            bound = OF_ATTENTION.bind(*args, **(kwargs or {})).arguments
            query, weight = bound["query"], bound["out_proj_weight"]
            if id(weight) in self._rows:
                self._rows[id(weight)].append(query.numel() // query.shape[-1])
        elif function is functional.linear:
            into, weight = [*tensors((*args, *(kwargs or {}).values()))][:2]
            if id(weight) in self._rows:
                self._rows[id(weight)].append(into.numel() // into.shape[-1])
        return function(*args, **(kwargs or {}))
