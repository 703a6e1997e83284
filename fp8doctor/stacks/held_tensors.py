"""The tensors of a batch, found and replaced in whatever holds them: mappings, sequences, named tuples,
dataclasses, and plain objects with tensors for attributes."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("fp8doctor")

DEEP = 3
"""Objects in objects that are looked into: one of them may hold the first again. A choice."""


def named_tensors(value: Any, name: Any = "", deep: int = DEEP) -> Iterator[tuple[Any, Tensor]]:
    """Yield every tensor with the key, field or attribute that holds it."""
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
    """Yield every tensor."""
    for _, tensor in named_tensors(value):
        yield tensor


def with_tensors(value: Any, of: Callable[[Tensor], Any], deep: int = DEEP) -> Any:
    """Put ``of(tensor)`` in the place of every tensor, in copies of what holds them; containers keep their
    kind."""
    if _is_tensor(value):
        return of(value)
    if isinstance(value, Mapping):
        return _of_kind(value, {key: with_tensors(each, of, deep) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        changed = [with_tensors(each, of, deep) for each in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    attributes = _attributes(value) if deep else {}
    if not attributes:
        return value
    copied = copy.copy(value)
    for name, each in attributes.items():
        object.__setattr__(copied, name, with_tensors(each, of, deep - 1))  # also of a frozen dataclass
    return copied


def _of_kind(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of the mapping with these values; a dict where it cannot be written to."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return changed
    try:
        copied = copy.copy(mapping)
        for key, each in changed.items():
            copied[key] = each
    except Exception:  # of a class of the user's or a library's
        _log.debug("a %s cannot be written to", type(mapping), exc_info=True)
        return changed
    return copied


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, or the attributes of another object that has tensors among them; a
    module is none, whose tensors are no data."""
    import torch

    if isinstance(value, (type, torch.nn.Module)):
        return {}
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    try:
        attributes = object.__getattribute__(value, "__dict__")  # what a proxy stands for stays unread
    except AttributeError:
        return {}
    return dict(attributes) if any(map(_is_tensor, attributes.values())) else {}
