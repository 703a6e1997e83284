"""The rows that the router gives each expert of a 3-D weight, seen where torch multiplies by it.

Such experts are no modules. A loop multiplies by one slice after another, a grouped GEMM by all at once with
the ends of their rows beside it, a batched one by all with the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fp8doctor.stacks.held_tensors import tensors

PRODUCT = re.compile(r"mm|matmul|linear")
"""In the name of every function of torch that multiplies matrices."""


class ExpertRows(TorchFunctionMode):
    """Notes the rows of every expert while it is on; a weight of a tensor subclass is not seen."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__()
        plain = (weight for weight in weights if type(weight) is nn.Parameter)
        self._rows: dict[int, list[int]] = {weight.untyped_storage().data_ptr(): [] for weight in plain}

    def of(self, weight: nn.Parameter) -> list[int]:
        """Return the rows of its experts, product by product; empty where none was seen."""
        return self._rows.get(weight.untyped_storage().data_ptr(), []) if type(weight) is nn.Parameter else []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._rows and PRODUCT.search(getattr(function, "__name__", "")):
            self._note(list(tensors((*args, *(kwargs or {}).values()))))
        return function(*args, **(kwargs or {}))

    def _note(self, given: list[torch.Tensor]) -> None:
        """Note a product whose second factor is such a weight."""
        if len(given) < 2 or type(given[1]) not in (torch.Tensor, nn.Parameter):
            return
        rows, weight, *ends = given
        seen = self._rows.get(weight.untyped_storage().data_ptr())
        if seen is None:
            return
        if weight.dim() == 2:
            seen.append(rows.numel() // rows.shape[-1])
        elif ends and not ends[0].is_floating_point():
            seen += ends[0].diff(prepend=ends[0].new_zeros(1)).tolist()
        elif rows.dim() == 3:
            seen += [rows.shape[1]] * rows.shape[0]
