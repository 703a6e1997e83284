"""What of the user's model a trial never needs to change: modules, flags, hooks, gradients, places of data.

What changed all the same is put back and named. Nothing is taken away for the time of a trial, so an
interrupt loses nothing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_log = logging.getLogger("fp8doctor")

NAMES = {
    "training": "training flags",
    "_parameters": "parameters",
    "_buffers": "buffers",
    "_modules": "modules",
    "_non_persistent_buffers_set": "buffers",
}
"""Attributes of a module -> what they are called; any other is a hook or an attribute."""

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a tensor that hold its hooks, None before the first one; verified on torch 2.13."""

Contents = dict[Any, tuple[Any, Any]]
"""Attribute -> its value, and what the value holds when that is a container."""


class Belongings:
    """The user's modules and tensors as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._modules = [
            (module, type(module), contents(vars(module))) for root in roots for module in root.modules()
        ]
        found = [
            tensor
            for module, _, _ in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        tensors = {id(tensor): tensor for tensor in found}.values()
        self._tensors = [(tensor, tensor.requires_grad, contents(_attributes(tensor))) for tensor in tensors]
        self._gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]
        places = [("parameters", tensor) for tensor in tensors]
        places += [("gradients", gradient) for _, gradient in self._gradients if gradient is not None]
        self._data = [(each, name, data) for name, each in places if (data := _data_of(each)) is not None]

    def put_back(self) -> list[str]:
        """Make everything as it was, and name what was not. What cannot be put back costs nothing else."""
        changed: dict[str, None] = {}
        parts: tuple[tuple[Callable[..., Iterable[str]], Iterable[tuple[Any, ...]]], ...] = (
            (_put_data_back, self._data),  # before the gradients, which have to have the dtype
            (_put_gradient_back, self._gradients),
            (_put_module_back, self._modules),
            (_put_attributes_back, self._tensors),
        )
        for put_back, items in parts:
            for item in items:
                try:
                    changed.update(dict.fromkeys(put_back(*item)))
                except Exception:  # of a tensor or a module of the user's or a library's
                    _log.debug("%s of %s", put_back.__name__, type(item[0]), exc_info=True)
        return list(changed)


def _put_gradient_back(tensor: torch.Tensor, gradient: torch.Tensor | None) -> list[str]:
    """Put the very gradient back. A step that clears gradients has changed none of it."""
    found = tensor.grad
    if found is not gradient:
        tensor.grad = gradient
    return [] if found is gradient or found is None else ["gradients"]


def _put_module_back(module: nn.Module, kind: type, held: Contents) -> list[str]:
    changed = [] if type(module) is kind else ["modules"]
    if changed:
        module.__class__ = kind
    names = restore(vars(module), held)
    return changed + [NAMES.get(name, "hooks" if "hooks" in name else "modules") for name in names]


def _put_data_back(tensor: torch.Tensor, name: str, data: torch.Tensor) -> list[str]:
    if tensor.dtype == data.dtype and tensor.is_set_to(data):
        return []
    tensor.data = data
    return [name]


def _put_attributes_back(tensor: torch.Tensor, requires_grad: bool, held: Contents) -> list[str]:
    changed = []
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        changed.append("requires_grad")
        tensor.requires_grad_(requires_grad)
    attributes = _attributes(tensor)
    for name in HOOKS:
        if attributes[name] and attributes[name] is not held[name][0]:
            attributes[name].clear()  # autograd holds on to it
    for name in restore(attributes, held):
        changed.append("hooks" if "hooks" in name else "attributes of parameters")
        setattr(tensor, name, attributes[name]) if name in attributes else delattr(tensor, name)
    return changed


def _data_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the data that ``.data = ...`` can put back; None where torch cannot tell whether it moved, as of
    quantized and nested tensors."""
    if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta:
        with suppress(NotImplementedError, RuntimeError):
            data = tensor.detach()
            if tensor.layout is torch.strided and tensor.is_set_to(data):
                return data
    return None


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Collect what is attached to a tensor: its hooks, and what the user or a library set."""
    return {**getattr(tensor, "__dict__", {}), **{name: getattr(tensor, name) for name in HOOKS}}


def contents(attributes: Mapping[Any, Any]) -> Contents:
    """Note attributes, and what those hold that are containers."""
    return {name: (value, _copied(value)) for name, value in attributes.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    kind = next((kind for kind in (dict, list, set, deque) if isinstance(value, kind)), None)
    return kind(value) if kind else None


def restore(attributes: dict[Any, Any], before: Contents) -> list[str]:
    """Put back every attribute and the contents of every container; name those that had changed."""
    changed = [name for name in attributes if name not in before]
    for name in changed:
        del attributes[name]
    for name, (value, held) in before.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value
            changed.append(name)
        if held is not None and not same(value, held):
            _refill(value, held)
            changed.append(name)
    return changed


def _refill(value: Any, held: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(held)
        return
    value.clear()
    value.extend(held) if isinstance(value, (list, deque)) else value.update(held)


def same(a: Any, b: Any) -> bool:
    """Whether a generator is in a state, or two containers of one kind hold the very same objects in the same
    order."""
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b)
    if isinstance(a, set):
        return bool(a == b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
