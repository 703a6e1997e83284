"""The optimizer: what is inside the wrappers around it, and which parameters it trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from fp8doctor.stacks.looking import ancestor, class_name, is_a, state_of
from fp8doctor.stacks.tensors import whole_size

DEEPEST = 3
"""Lists within lists that are looked through. DeepSpeed keeps one for each group, or for each part of one."""


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper, which has the same groups."""
    of_accelerate = ancestor(type(optimizer), "accelerate.", ("AcceleratedOptimizer",))
    return state_of(optimizer).get("optimizer", optimizer) if of_accelerate else optimizer


def innermost(optimizer: Any) -> Any:
    """The optimizer inside all wrappers, which may hold copies of the parameters."""
    while (inner := state_of(optimizer).get("optimizer")) is not None:
        optimizer = inner
    return optimizer


def written_back(wrapper: Any) -> list[nn.Parameter]:
    """Find the parameters that a wrapper holds itself, and writes the copies back to that are stepped.

    DeepSpeed 0.19.8 keeps them in lists by group, with ZeRO (stages 1 to 3) and without.
    """
    held = (each for value in state_of(wrapper).values() for each in _parameters_in(value, DEEPEST))
    return list({id(each): each for each in held}.values())


def _parameters_in(value: Any, deepest: int) -> Iterator[nn.Parameter]:
    if is_a(value, nn.Parameter):
        yield value
    elif deepest and type(value) in (list, tuple):
        for each in value:
            yield from _parameters_in(each, deepest - 1)


def outside(
    optimizer: Any, found: list[nn.Parameter], gaps: dict[str, str], *, others: Sequence[Any] = ()
) -> list[nn.Parameter] | None:
    """Find trainable parameters in no group of the optimizer or of the others; None when its groups cannot
    tell.

    DeepSpeed's optimizers and torchao's CPU offload hold copies, and Muon takes matrices only, so that others
    beside it do the rest.
    """
    inner = unwrapped(optimizer)
    groups = [group for each in (inner, *map(unwrapped, others)) for group in each.param_groups]
    inside = {id(each) for group in groups for each in group["params"]}
    if innermost(inner) is not inner:
        inside |= {id(each) for each in written_back(inner)}
    trainable = [
        each
        for each in found
        if each.requires_grad and not is_a(each, nn.UninitializedParameter) and whole_size(each)
    ]
    left_out = [each for each in trainable if id(each) not in inside]
    kind = class_name(type(inner))
    if left_out and kind.endswith(".Muon"):
        gaps["training.parameters_outside_optimizer"] = (
            "Muon takes matrices only; the optimizer of the other parameters was not given"
        )
        return None
    if left_out and len(left_out) == len(trainable) and not kind.startswith("torch.optim."):
        gaps["training.parameters_outside_optimizer"] = (
            f"{kind.rpartition('.')[2]} holds none of the model's parameters; it may hold copies of them"
        )
        return None
    return left_out
