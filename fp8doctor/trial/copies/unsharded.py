"""Make a plain model of a sharded one, on one process alone (docs/traps.md): nothing is communicated."""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import class_name, innermost, parameters_in
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


@dataclass(frozen=True)
class _Place:
    """A module in the sharded model."""

    module: nn.Module
    fsdp: str | None
    """`FSDP2`, `FSDP1` or `DEEPSPEED`, if the module is one."""
    policy: Any
    """Mixed precision of the nearest module of FSDP."""
    in_fsdp2: bool

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that computes; None for that of the parameters."""
        return getattr(self.policy, "param_dtype", None)


def unsharded(job: Job) -> Job:
    """Return the job with a plain model in place of a sharded one, else itself. Raises `NotReplicable`."""
    if not isinstance(job.model, nn.Module):
        return job
    modules = [*job.model.modules()]
    parameters = (each for module in modules for each in module._parameters.values())
    if not any(_of(type(each), FSDP2, FSDP1, DTENSOR, DEEPSPEED) for each in (*modules, *parameters)):
        return job
    if any(_of(type(each), DTENSOR) for each in tensors(job.batch)):
        raise NotReplicable("its batch is sharded over processes (DTensor)")
    places = _places(job.model)
    stand_ins = {key: made for place in places for key, made in _stand_ins(place)}
    whole: Any = job.model
    plain, memo = replicate(
        whole.module if _of(type(whole), DEEPSPEED) else whole,  # an engine has a __del__, and is not copied
        share=True,
        stand_ins=stand_ins,
        fill=lambda memo: _memoize_modules(places, memo),
    )
    of_fsdp = [place for place in places if place.fsdp in (FSDP2, FSDP1)]
    for place in of_fsdp:
        root = place is of_fsdp[0] and getattr(place.policy, "cast_root_forward_inputs", False)
        casts = root or getattr(place.policy, "cast_forward_inputs", False)
        hook = InputCastHook(place.dtype if casts else None)
        memo[id(place.module)].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    optimizer = _optimizer(job.optimizer, memo, plain.parameters())
    return replace(job, model=plain, rebuild=None, optimizer=optimizer, sharded=job)


def _of(kind: type, *names: str) -> str | None:
    """Return the first of these names that a class or an ancestor has, of `LIBRARIES`."""
    own = (each.__name__ for each in kind.__mro__ if each.__module__.startswith(LIBRARIES))
    return next((name for name in own if name in names), None)


def _places(root: nn.Module) -> list[_Place]:
    """List every module once, the outer ones first."""
    places: dict[str, _Place] = {}
    for name, module in root.named_modules():
        above = places.get(name.rpartition(".")[0])
        fsdp, policy = _of(type(module), FSDP2, FSDP1, DEEPSPEED), above.policy if above else None
        if fsdp is not None:
            policy = fsdp2_policy(module) if fsdp == FSDP2 else getattr(module, "mixed_precision", None)
        in_fsdp2 = fsdp == FSDP2 or (above is not None and above.in_fsdp2)
        places[name] = _Place(module, fsdp, policy, in_fsdp2)
    return list(places.values())


def _stand_ins(place: _Place) -> Iterator[tuple[int, nn.Parameter]]:
    """Make stand-ins for a module's own sharded parameters, or for all of an engine, by their ``id``."""
    if place.fsdp == DEEPSPEED:
        engine: Any = place.module
        first = next(parameters_in(innermost(engine.optimizer)), None)
        stepped = torch.float32 if first is None else first.dtype
        part = engine.dp_world_size if engine.zero_optimization_stage() else 1  # ZeRO steps a share
        for parameter in engine.module.parameters():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO 3 leaves no data in it
            elements = math.ceil(math.prod(shape) / part)
            yield id(parameter), stand_in(parameter, shape, None, elements, stepped)
        return
    if place.fsdp == FSDP1:
        kept = fsdp1_parameters(place.module)
        if kept is None:
            raise NotReplicable(
                "FSDP keeps its parameters flat (use_orig_params=False), so nobody knows its layers' shapes"
            )
        for parameter, shape, elements in kept:
            yield id(parameter), stand_in(parameter, shape, place.dtype, elements)
    for name, sharded in place.module._parameters.items():
        if sharded is None or not _of(type(sharded), DTENSOR):
            continue
        if not place.in_fsdp2 or sum(each.is_shard() for each in sharded.placements) > 1:  # type: ignore[attr-defined]
            raise NotReplicable(
                f"its parameter {name} is split by tensor parallelism (DTensor): a copy without the "
                "collectives between its layers would do other work"
            )
        held = local(sharded)
        if class_name(type(held)) not in PLAIN and tensor_class(held) != ALL_GATHER_WEIGHT:
            raise NotReplicable(f"its parameter {name} is a sharded {type(held).__name__}")
        yield id(sharded), stand_in(sharded, tuple(sharded.shape), place.dtype, held.numel())


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


def _optimizer(optimizer: Any, memo: dict[int, Any], parameters: Iterable[nn.Parameter]) -> Any:
    """Return what a copy's optimizer is made of: the class, its settings, and the stand-ins in groups."""
    own = innermost(optimizer)
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
