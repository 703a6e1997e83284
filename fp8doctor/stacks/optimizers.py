"""Read optimizers: their parameters, and what is inside a wrapper's."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from fp8doctor.stacks.looking import ancestor, is_a, state_of


def parameters_in(optimizer: Any) -> Iterator[Any]:
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper, with the same groups."""
    of_accelerate = ancestor(type(optimizer), "accelerate.", ("AcceleratedOptimizer",))
    return state_of(optimizer).get("optimizer", optimizer) if of_accelerate else optimizer


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside all wrappers, which may hold parameter copies."""
    inner = optimizer
    while inner is not None:
        optimizer, state = inner, state_of(inner)
        inner = state.get("optimizer", state.get("_optimizer"))  # the second is Lightning's
    return optimizer


def written_back(wrapper: Any) -> list[nn.Parameter]:
    """Return a wrapper's own parameters, which it updates from the stepped copies.

    DeepSpeed 0.19.8 keeps them in lists by group, or by part of one, with ZeRO (stages 1 to 3) and without.
    """
    held = list(state_of(wrapper).values())
    for _ in range(3):
        held = [inner for each in held for inner in (each if type(each) in (list, tuple) else (each,))]
    return list({id(each): each for each in held if is_a(each, nn.Parameter)}.values())
