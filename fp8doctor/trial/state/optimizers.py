"""The settings of the user's optimizers (the learning rate and the rest of their groups), noted and put
back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8doctor.trial.state.settings import alike


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class Settings:
    """The groups of optimizers as they are now. A tensor among them is left to the guard of its storage."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._groups = [
            (group, {name: value for name, value in group.items() if not _is_held(name, value)})
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
        ]

    def put_back(self) -> list[str]:
        """Make every setting as it was; name those that were not."""
        changed: dict[str, None] = {}
        for group, before in self._groups:
            for name in [each for each in group if each not in before and not _is_held(each, group[each])]:
                del group[name]
                changed[repr(name)] = None
            for name, value in before.items():
                if name not in group or not alike(group[name], value):
                    group[name] = value
                    changed[repr(name)] = None
        return list(changed)


def _is_held(name: str, value: Any) -> bool:
    return name == "params" or isinstance(value, torch.Tensor)
