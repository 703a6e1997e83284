"""Make a plain model of a sharded one, on one process alone: nothing is communicated.

Its classes are those before FSDP, its parameters are stand-ins of the whole shape in the dtype that computes
(`fp8doctor.trial.copies.shards`), and FSDP's hooks are replaced by one that casts as they do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import class_name
from fp8doctor.stacks.tensors import PLAIN, local, tensors
from fp8doctor.stacks.torch_private import (
    behind_compile,
    context_of,
    fsdp1_parameters,
    fsdp2_policy,
    is_fsdps,
    without_fsdps,
)
from fp8doctor.stacks.torchao import ALL_GATHER_WEIGHT, tensor_class
from fp8doctor.trial.copies.replica import NotReplicable, replicate
from fp8doctor.trial.copies.shards import InputCastHook, partial_step_optimizer, stand_in

FSDP2, FSDP1, DTENSOR = "FSDPModule", "FullyShardedDataParallel", "DTensor"
DEEPSPEED = "DeepSpeedEngine"
LIBRARIES = ("torch.distributed", "deepspeed.")
"""Homes of these classes."""

SPLIT = (
    "its parameter {} is split by tensor parallelism (DTensor): a copy without the collectives between its "
    "layers would do other work"
)
FLAT = "FSDP keeps its parameters flat (use_orig_params=False), so the shapes of its layers are not known"


@dataclass(frozen=True)
class _Place:
    """A module in the sharded model."""

    module: nn.Module
    fsdp: str | None
    """`FSDP2`, `FSDP1` or `DEEPSPEED`, if the module is one; else None."""
    policy: Any
    """Mixed precision of the nearest module of FSDP."""
    in_fsdp2: bool

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that computes; None for that of the parameters."""
        return getattr(self.policy, "param_dtype", None)


def sharded_by(model: nn.Module) -> str | None:
    """Name the class of FSDP, DTensor or DeepSpeed if the model is sharded, else None."""
    for module in model.modules():
        held = (type(each) for each in module._parameters.values() if each is not None)
        for kind in (type(module), *held):
            if found := _of(kind, FSDP2, FSDP1, DTENSOR, DEEPSPEED):
                return found
    return None


def unsharded(job: Job) -> Job:
    """Return the job with a plain model in place of a sharded one, else the job itself.

    Raises `NotReplicable` for what such a model cannot stand for.
    """
    if not isinstance(job.model, nn.Module) or sharded_by(job.model) is None:
        return job
    if any(_of(type(each), DTENSOR) for each in tensors(job.batch)):
        raise NotReplicable("its batch is sharded over processes (DTensor)")
    places = list(_places(job.model))
    stand_ins = {key: made for place in places for key, made in _stand_ins(place)}
    plain, memo = replicate(
        job.model, share=True, stand_ins=stand_ins, fill=lambda memo: _memoize_modules(places, memo)
    )
    of_fsdp = [place for place in places if place.fsdp in (FSDP2, FSDP1)]
    for place in of_fsdp:
        hook = InputCastHook(place.dtype if _casts(place, is_root=place is of_fsdp[0]) else None)
        memo[id(place.module)].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return replace(
        job,
        model=plain,
        rebuild=None,
        optimizer=_optimizer(job.optimizer, memo, plain.parameters()),
        sharded=job,
    )


def _of(kind: type, *names: str) -> str | None:
    """Return the first of these names that a class or an ancestor has, of `LIBRARIES`."""
    return next(
        (
            each.__name__
            for each in kind.__mro__
            if each.__name__ in names and each.__module__.startswith(LIBRARIES)
        ),
        None,
    )


def _places(
    module: nn.Module, policy: Any = None, in_fsdp2: bool = False, seen: set[int] | None = None
) -> Iterator[_Place]:
    """Yield every module once, the outer ones first."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    fsdp = _of(type(module), FSDP2, FSDP1, DEEPSPEED)
    if fsdp is not None:
        in_fsdp2 = in_fsdp2 or fsdp == FSDP2
        policy = fsdp2_policy(module) if fsdp == FSDP2 else getattr(module, "mixed_precision", None)
    yield _Place(module, fsdp, policy, in_fsdp2)
    for child in module.children():
        yield from _places(child, policy, in_fsdp2, seen)


def _stand_ins(place: _Place) -> Iterator[tuple[int, nn.Parameter]]:
    """Make stand-ins for a module's own sharded parameters, by their ``id``."""
    if place.fsdp == DEEPSPEED:
        yield from _of_deepspeed(place.module)
        return
    if place.fsdp == FSDP1:
        kept = fsdp1_parameters(place.module)
        if kept is None:
            raise NotReplicable(FLAT)
        for parameter, shape, elements in kept:
            yield id(parameter), stand_in(parameter, shape, place.dtype, elements)
    for name, parameter in place.module._parameters.items():
        if parameter is None or not _of(type(parameter), DTENSOR):
            continue
        if not place.in_fsdp2 or sum(each.is_shard() for each in parameter.placements) > 1:  # type: ignore[attr-defined]
            raise NotReplicable(SPLIT.format(name))
        part = local(parameter)
        if class_name(type(part)) not in PLAIN and tensor_class(part) != ALL_GATHER_WEIGHT:
            raise NotReplicable(f"its parameter {name} is a sharded {type(part).__name__}")
        yield id(parameter), stand_in(parameter, tuple(parameter.shape), place.dtype, part.numel())


def _of_deepspeed(engine: Any) -> Iterator[tuple[int, nn.Parameter]]:
    """Make stand-ins for all parameters of an engine, of which ZeRO steps a share."""
    own = getattr(engine.optimizer, "optimizer", engine.optimizer)
    dtypes = {each.dtype for group in own.param_groups for each in group["params"]} or {torch.float32}
    part = engine.dp_world_size if engine.zero_optimization_stage() else 1
    for parameter in engine.module.parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 leaves no data in it
        elements = math.ceil(math.prod(shape) / part)
        yield id(parameter), stand_in(parameter, shape, None, elements, stepped=next(iter(dtypes)))


def _memoize_modules(places: list[_Place], memo: dict[int, Any]) -> None:
    """Put a plain copy of every module of FSDP into the memo."""
    for place in places:
        if place.fsdp == FSDP2 and behind_compile(place.module) is None:
            own: Any = next(each for each in type(place.module).__mro__[1:] if not _of(each, FSDP2))
            memo[id(place.module)] = own.__new__(own)  # FSDP puts a class in front of a module's own
        for value in vars(place.module).values():
            if is_fsdps(value):  # Transformer Engine keeps a reference to FSDP's state
                memo[id(value)] = None
    for place in reversed(places):  # the inner ones first
        module = place.module
        if (inside := behind_compile(module)) is not None:
            memo[id(module)] = context_of(module)(copy.deepcopy(inside, memo))  # type: ignore[misc]
        elif place.fsdp == FSDP2:
            reduced: Any = module.__reduce_ex__(4)
            memo[id(module)].__setstate__(copy.deepcopy(without_fsdps(dict(reduced[2])), memo))
        elif place.fsdp in (FSDP1, DEEPSPEED):
            memo[id(module)] = copy.deepcopy(module.module, memo)
        elif (made := memo.get(id(module))) is not None:
            without_fsdps(vars(made))
            made._parameters = dict(made._parameters)  # ZeRO 3 puts a class of its own there


def _casts(place: _Place, *, is_root: bool) -> bool:
    """Tell if FSDP casts what a module is called with."""
    names = ("cast_forward_inputs", *(["cast_root_forward_inputs"] if is_root else []))
    return any(getattr(place.policy, name, False) for name in names)


def _optimizer(optimizer: Any, memo: dict[int, Any], parameters: Iterable[nn.Parameter]) -> Any:
    """Return what a copy's optimizer is made of: the class, its settings, and the stand-ins in groups."""
    own = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(own, torch.optim.Optimizer):
        return optimizer
    kind = partial_step_optimizer(type(own))
    made = kind.__new__(kind)
    groups = [
        {**group, "params": [memo[id(each)] for each in group["params"] if id(each) in memo]}
        for group in own.param_groups
    ]
    if not any(group["params"] for group in groups):  # DeepSpeed's holds flat copies
        groups = [{**own.param_groups[0], "params": list(parameters)}]
    made.__dict__.update(vars(own), param_groups=groups, state={})
    return made
