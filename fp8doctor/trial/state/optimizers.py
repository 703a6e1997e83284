"""The user's optimizers (their groups with the learning rate, and their state), noted and put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8doctor.trial.state.belongings import contents, restore, same
from fp8doctor.trial.state.settings import alike


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class Settings:
    """Optimizers and their groups as they are now. A tensor in them is left to the guard of its storage."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        optimizers = list(optimizers)
        own = [each.__dict__ for each in optimizers if hasattr(each, "__dict__")]
        states = [each.state for each in optimizers if isinstance(getattr(each, "state", None), dict)]
        self._held = [(held, contents(held)) for held in (*own, *states)]
        self._groups = [
            (group, {name: value for name, value in group.items() if not _is_held(name, value)})
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
        ]
        self._trained = [(group, group["params"], list(group["params"])) for group, _ in self._groups]

    def put_back(self) -> list[str]:
        """Make everything as it was; name what was not."""
        changed: dict[str, None] = {}
        for held, before in self._held:
            changed.update(
                (name if isinstance(name, str) else "state", None) for name in restore(held, before)
            )
        for group, before in self._groups:
            for name in [each for each in group if each not in before and not _is_held(each, group[each])]:
                del group[name]
                changed[name] = None
            for name, value in before.items():
                if name not in group or not alike(group[name], value):
                    group[name] = value
                    changed[name] = None
        for group, parameters, trained in self._trained:
            if group["params"] is not parameters or not same(parameters, trained):
                group["params"], parameters[:] = parameters, trained
                changed["params"] = None
        return [repr(name) for name in changed]


def _is_held(name: str, value: Any) -> bool:
    return name == "params" or isinstance(value, torch.Tensor)
