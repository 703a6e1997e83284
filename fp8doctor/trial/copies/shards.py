"""Placeholders for the shards of a sharded model: parameters of the whole shape without data.

A copy gets random values for them. Its optimizer steps this process's part of each parameter, as in the job.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fp8doctor.stacks.torch_private import never_traced

SHARD = "_fp8doctor_shard"
"""Attribute of a stand-in, and of what is made of it, with its `Shard`."""


@dataclass(frozen=True)
class Shard:
    """This process's part of a parameter, which the optimizer steps in the dtype."""

    elements: int
    dtype: torch.dtype


def stand_in(
    parameter: nn.Parameter,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    elements: int,
    stepped: torch.dtype | None = None,
) -> nn.Parameter:
    """Return a parameter of the whole shape without data.

    ``dtype`` computes and ``stepped`` is the optimizer's; None is the parameter's own.
    """
    computes = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    made = nn.Parameter(
        torch.empty(shape, dtype=computes, device="meta"), requires_grad=parameter.requires_grad
    )
    made.__dict__[SHARD] = Shard(elements, stepped or parameter.dtype)
    return made


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Tell if a tensor has the shape of a sharded parameter and no data."""
    return tensor.is_meta and SHARD in tensor.__dict__


def filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Make random values of a stand-in's shape; those of a norm are 1, so that nothing grows with depth."""
    data = torch.ones_like(tensor, device=device)
    if data.ndim > 1 and data.is_floating_point():
        data.normal_(std=data.shape[-1] ** -0.5)
    return data


class InputCastHook:
    """A hook that casts a module's inputs, outside of graphs, where FSDP has one that does."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    @never_traced  # as FSDP's, around whose module a graph ends
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Cast tensors of floating point; None casts none."""

        def cast(value: Any) -> Any:
            return value.to(self._dtype) if torch.is_tensor(value) and value.is_floating_point() else value

        return (args, kwargs) if self._dtype is None else tree_map(cast, (args, kwargs))


def partial_step_optimizer(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of an optimizer that steps the part of each parameter that a process holds.

    One without a `Shard` is whole.
    """

    def part_of(parameter: nn.Parameter, parts: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> nn.Parameter:
        shard: Shard | None = parameter.__dict__.get(SHARD)
        if shard is None:
            return parameter
        if id(parameter) not in parts:
            data = _first(parameter.detach(), shard.elements).to(shard.dtype, copy=True)
            parts[id(parameter)] = parameter, nn.Parameter(data)
        part = parts[id(parameter)][1]
        gradient = parameter.grad
        part.grad = None if gradient is None else _first(gradient, shard.elements).to(shard.dtype)
        return part

    def step(self: Any, closure: Callable[[], float] | None = None) -> Any:
        parts = self.__dict__.setdefault("_fp8doctor_parts", {})
        whole = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [part_of(each, parts) for each in group["params"]]
            return kind.step(self, closure) if closure is not None else kind.step(self)
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                group["params"] = parameters

    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def _first(whole: torch.Tensor, elements: int) -> torch.Tensor:
    """Return about so many elements in whole rows, as FSDP divides."""
    rows = math.ceil(elements / max(1, math.prod(whole.shape[1:])))
    return whole[:rows] if whole.ndim else whole
