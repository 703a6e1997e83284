"""What of the user's model a trial never needs to change: modules, flags, hooks, gradients, places of data.

What changed all the same is put back and named. While replicas run, the parameters have no gradients: what
still reaches the original lands in new ones, which are thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

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
        self._data = [(tensor, tensor.detach()) for tensor in tensors if _can_move(tensor)]
        self._gradients = [
            (tensor, tensor.grad, _can_be_taken(tensor)) for tensor in tensors if tensor.is_leaf
        ]

    def take_gradients(self) -> None:
        """Leave the parameters without gradients until `put_back`."""
        for tensor, _, can_be_taken in self._gradients:
            if can_be_taken:
                tensor.grad = None

    def put_back(self) -> list[str]:
        """Make everything as it was, and name what was not."""
        changed: dict[str, None] = {}
        for module, kind, held in self._modules:
            if type(module) is not kind:
                changed["modules"] = None
                module.__class__ = kind
            for name in restore(vars(module), held):
                changed[NAMES.get(name, "hooks" if "hooks" in name else "modules")] = None
        for tensor, data in self._data:
            if tensor.dtype != data.dtype or not tensor.is_set_to(data):
                changed["parameters"] = None
                tensor.data = data
        for tensor, requires_grad, held in self._tensors:
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                changed["requires_grad"] = None
                tensor.requires_grad_(requires_grad)
            attributes = _attributes(tensor)
            for name in HOOKS:
                if attributes[name] and attributes[name] is not held[name][0]:
                    attributes[name].clear()  # autograd holds on to it
            for name in restore(attributes, held):
                changed["hooks" if "hooks" in name else "attributes of parameters"] = None
                setattr(tensor, name, attributes[name]) if name in attributes else delattr(tensor, name)
        for tensor, gradient, taken in self._gradients:
            if tensor.grad is not (None if taken else gradient):
                changed["gradients"] = None
            if tensor.grad is not gradient:
                tensor.grad = gradient
        return list(changed)


def _can_move(tensor: torch.Tensor) -> bool:
    """Whether the tensor has data that ``.data = ...`` can replace."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout is torch.strided
    )


def _can_be_taken(tensor: torch.Tensor) -> bool:
    """Whether a gradient can be set again: torch refuses one of another dtype than the parameter, though it
    may hold it."""
    if tensor.grad is None:
        return False
    try:
        tensor.grad = tensor.grad
    except (RuntimeError, TypeError):
        return False
    return True


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
