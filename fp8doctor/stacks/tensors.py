"""Tensors inside weights and batches: classes, data, dtypes, bytes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from fp8doctor.stacks.looking import TENSOR, acts_on_its_death, class_name, home, is_module, lineage, read
from fp8doctor.stacks.torch_private import FAKE_TENSOR, local_tensor

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = ("torch.nn.parameter.Parameter", "torch.Tensor", "torch.nn.parameter.Buffer")

OF_TRANSFORMER_ENGINE = (
    *("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv"),
    *("_transpose", "_columnwise_data", "_columnwise_scale_inv"),
)
"""Attributes of its quantized tensors with their data and the transposed copy for matmuls (Float8Tensor,
MXFP8Tensor, Float8BlockwiseQTensor, NVFP4Tensor, 2.0 to 2.20; only some versions can be flattened)."""


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor; other tensors unchanged."""
    inner = local_tensor(tensor) if home(type(tensor)).startswith("torch.distributed") else None
    return tensor if inner is None else inner


def subclass(tensor: Tensor) -> str | None:
    """Name a tensor's subclass, also inside a DTensor; None for an ordinary tensor."""
    inside, outside = class_name(type(local(tensor))), class_name(type(tensor))
    return next((name for name in (inside, outside) if name not in PLAIN), None)


def stored(tensor: Tensor) -> Tensor:
    """Return the first plain tensor inside a subclass, such as float8 data."""
    return next(plain(tensor))


def has_data(tensor: Tensor) -> bool:
    """Tell if a tensor has numbers: meta and fake tensors have none."""
    return not tensor.is_meta and class_name(type(tensor)) != FAKE_TENSOR


def whole_size(parameter: Tensor) -> int:
    """Count a parameter's elements, including ZeRO-3's parts in other processes."""
    whole = read(parameter, "ds_numel")
    return whole if isinstance(whole, int) else parameter.numel()


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a subclass, or the tensor itself."""
    tensor = local(tensor)
    inner = _inside(tensor)
    if not inner:
        yield tensor
    for each in inner:
        yield from plain(each)


def dtype_name(tensor: Tensor) -> str:
    """Return ``bfloat16``, ``float8_e4m3fn``, ..."""
    return str(tensor.dtype).removeprefix("torch.")


def is_float8(tensor: Tensor) -> bool:
    return str(tensor.dtype).startswith("torch.float8")


def _inside(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a subclass; empty for an ordinary tensor."""
    if class_name(type(tensor)) in PLAIN:
        return []
    if any(module.startswith("transformer_engine.") for module, _ in lineage(type(tensor))):
        found = (getattr(tensor, name, None) for name in OF_TRANSFORMER_ENGINE)
        return [each for each in found if each is not None]
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [getattr(tensor, name) for name in names]


DEEP = 3
"""Depth of objects in objects to search, which may be cyclic. A choice."""


def named_tensors(value: Any, name: Any = "", deep: int = DEEP) -> Iterator[tuple[Any, Tensor]]:
    if _is_tensor(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_tensors(each, key, deep)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from named_tensors(each, name, deep)
    elif deep:
        for attribute, each in _attributes(value).items():
            yield from named_tensors(each, attribute, deep - 1)


def tensors(value: Any) -> Iterator[Tensor]:
    for _, tensor in named_tensors(value):
        yield tensor


def with_tensors(value: Any, of: Callable[[Tensor], Any], deep: int = DEEP) -> Any:
    """Replace every tensor by ``of(tensor)`` in copies of its containers.

    An object that acts on its death is not copied.
    """
    if acts_on_its_death(type(value)):
        return value
    if _is_tensor(value):
        return of(value)
    if isinstance(value, Mapping):
        changed = {key: with_tensors(each, of, deep) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        copied = copy.copy(value)
        for key, each in changed.items():
            copied[key] = each
        return copied
    if isinstance(value, (list, tuple)):
        parts = [with_tensors(each, of, deep) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    attributes = _attributes(value) if deep else {}
    if not attributes:
        return value
    copied = copy.copy(value)
    for name, each in attributes.items():
        object.__setattr__(copied, name, with_tensors(each, of, deep - 1))  # also of a frozen dataclass
    return copied


def _is_tensor(value: Any) -> bool:
    return TENSOR in lineage(type(value))


def _attributes(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields, or an object's attributes if it has tensors."""
    if isinstance(value, type) or is_module(value):
        return {}
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    try:
        attributes = object.__getattribute__(value, "__dict__")  # a proxy would compute it
    except AttributeError:
        return {}
    return dict(attributes) if any(map(_is_tensor, attributes.values())) else {}


def captured(tensor: Tensor) -> bool:
    """Tell if a CUDA graph is being captured, which would include work on this tensor."""
    import torch

    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
