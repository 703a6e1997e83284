"""Training around the module tree: autocast, compile marks, checkpointing, Accelerate, Trainer, optimizer."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from fp8doctor.examine.allocator import examine_allocator
from fp8doctor.examine.checkpointing import of_the_process
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.conversion import examine_conversion, examine_converter
from fp8doctor.examine.dynamo import examine_dynamo
from fp8doctor.examine.kv_cache import cache_holder, cache_switch, use_cache
from fp8doctor.examine.optimizer import innermost, outside, unwrapped
from fp8doctor.examine.walk import Tree, parameters
from fp8doctor.facts import Accelerate, TrainerArguments, Training
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job, is_trainer
from fp8doctor.stacks.looking import class_name, forward_of, read, state_of

FIRST = 5
"""Names that stand for a longer list."""


def examine_training(tree: Tree, job: Job, gaps: dict[str, str]) -> Training:
    """Read the training state of a job whose model was walked; ``gaps`` names what cannot be read."""
    forward = forward_of(tree.root.module)
    arguments = read(job.trainer, "args", job.trainer)
    optimizer = (
        job.optimizer
        if job.optimizer is not None
        else state_of(job.trainer).get("optimizer")
        if arguments is not job.trainer
        else None
    )
    names: dict[int, str] = {}
    unique: dict[int, nn.Parameter] = {}
    for name, parameter in parameters(tree):
        names.setdefault(id(parameter), name)
        unique[id(parameter)] = parameter
    left_out = (
        None
        if optimizer is None
        else outside(optimizer, list(unique.values()), gaps, others=job.other_optimizers)
    )
    asked = True if any(each.active for each in tree.checkpointing) else None
    return Training(
        autocast=autocast_dtype(job, forward, list(unique.values()), gaps),
        gradients_seen=any(each.grad is not None for each in unique.values()),
        compile_marks=tuple(tree.marks),
        compiled_elsewhere=tuple(job.compiled_elsewhere),
        dynamo=examine_dynamo(gaps),
        checkpointing=(*tree.checkpointing, *of_the_process(asked)),
        forward_chain=forward_chain(forward),
        accelerate=examine_accelerate(tree),
        trainer=trainer_arguments(
            arguments, own_loss(job.trainer) if is_trainer(job.trainer) else NOT_RECORDED
        ),
        optimizer=None if optimizer is None else class_name(type(unwrapped(optimizer))),
        use_cache=use_cache(tree, arguments),
        cache_switch=cache_switch(tree, arguments),
        cache_holder=cache_holder(tree, cache_switch(tree, arguments)),
        alloc_retries=examine_allocator(gaps),
        optimizer_stepped=None if optimizer is None else bool(read(innermost(optimizer), "state")),
        parameters_outside_optimizer=None
        if optimizer is None
        else NOT_RECORDED
        if left_out is None
        else len(left_out),
        first_outside_optimizer=tuple(names[id(each)] for each in (left_out or ())[:FIRST]),
        conversion=examine_conversion(tree, job.watched, gaps),
        converter=examine_converter(job.watched, tree, (optimizer, *job.other_optimizers)),
    )


def autocast_dtype(job: Job, forward: Any, found: list[nn.Parameter], gaps: dict[str, str]) -> Any:
    """Read the autocast that the step runs under: the job's, the one around forward, or the one in force
    here; ``NOT_RECORDED`` where no call of the step was seen."""
    if job.autocast is not None:
        return _name(job.autocast)
    around = next((dtype for link in chain(forward) if (dtype := _autocast_around(link)) is not None), None)
    if around is not None:
        return _name(around)
    for device in sorted({each.device.type for each in found} & {"cpu", "cuda"}, reverse=True):
        if torch.is_autocast_enabled(device):
            return _name(torch.get_autocast_dtype(device))
    if job.unseen:
        gaps["training.autocast"] = job.unseen
        return NOT_RECORDED
    return None


def _autocast_around(link: Any) -> torch.dtype | None:
    """Read the dtype of an autocast decorator, from its closure (torch 2.6 to 2.15)."""
    function = read(link, "__func__", link)
    code = read(function, "__code__")
    if code is None or "autocast_instance" not in code.co_freevars:
        return None
    instance = function.__closure__[code.co_freevars.index("autocast_instance")].cell_contents
    return read(instance, "fast_dtype") if read(instance, "_enabled", True) else None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def forward_chain(forward: Any) -> tuple[str, ...]:
    """Name the wrappers around a forward by their own code: ``functools.wraps`` takes over the inner name."""
    links = [_link_name(link) for link in chain(forward)]
    return tuple(links[:-1])


def _link_name(link: Any) -> str:
    function = read(link, "__func__", link)
    code = read(function, "__code__")
    if code is None:
        return class_name(type(function))
    return f"{function.__globals__.get('__name__', '')}.{code.co_qualname}"


STEP_OF_A_TRAINER = ("training_step", "compute_loss")
"""Methods of a transformers Trainer that compute the loss, the outer one first."""

LOSS_OF_A_TRAINER = ("compute_loss_func", "label_smoother")
"""Attributes of a transformers Trainer (4.46 to 5.23) that compute the loss where they are not None."""


def own_loss(trainer: Any) -> str | None:
    """Name what of a Trainer computes the loss in the model's place; nothing of it is called.

    It may change the Trainer, as TRL's do that note metrics there, so a copy's step leaves it out.
    """
    state = state_of(trainer)
    for name in STEP_OF_A_TRAINER:
        owner = next(each for each in type(trainer).__mro__ if name in vars(each))
        if name in state or str(owner.__module__).partition(".")[0] != "transformers":
            return f"{type(trainer).__name__ if name in state else owner.__name__}.{name}"
    return next((name for name in LOSS_OF_A_TRAINER if state.get(name) is not None), None)


def trainer_arguments(arguments: Any, own_loss: str | None = NOT_RECORDED) -> TrainerArguments | None:
    """Tell what a Trainer's arguments ask for, read from their fields so that no property runs."""
    if arguments is None:
        return None
    settings = state_of(arguments)
    checkpointing = settings.get("activation_checkpointing", settings.get("gradient_checkpointing"))
    return TrainerArguments(
        kind=class_name(type(arguments)),
        bf16=settings.get("bf16"),
        fp16=settings.get("fp16"),
        mixed_precision=settings.get("mixed_precision"),
        checkpointing=checkpointing,
        own_loss=own_loss,
    )


def examine_accelerate(tree: Tree | None) -> Accelerate | None:
    """Read Accelerate's state; None without one, as before an Accelerator exists. Without a tree nothing is
    told of a model."""
    module = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = dict(getattr(getattr(module, "AcceleratorState", None), "_shared_state", {}))
    process: dict[str, Any] = dict(getattr(getattr(module, "PartialState", None), "_shared_state", {}))
    if not shared and not process:
        return None
    state = Accelerate(
        mixed_precision=_word(shared.get("_mixed_precision")),
        distributed=_word(shared.get("distributed_type", process.get("distributed_type"))),
        may_prepare=accelerator_waits(),
    )
    if tree is None:
        return state
    return replace(state, prepared=is_prepared(tree), te_autocast=runs_te_autocast(tree))


def is_prepared(tree: Tree) -> bool:
    """Whether this model, or a wrapper of it, went through ``Accelerator.prepare``."""
    return any(state_of(module).get("_is_accelerate_prepared", False) for module in _wrapped_and_root(tree))


def accelerator_waits() -> bool:
    """Whether an Accelerator is alive that has prepared no model, which its state does not tell."""
    kind = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if kind is None:
        return False
    return any(issubclass(type(each), kind) and not vars(each).get("_models") for each in gc.get_objects())


def runs_te_autocast(tree: Tree) -> bool:
    """Whether a forward goes through ``contextual_fp8_autocast`` (1.0 to 1.15): the model's own, or under DDP
    and FSDP the wrapper's."""
    forwards = (state_of(module).get("forward") for module in _wrapped_and_root(tree))
    codes = (read(link, "__code__") for forward in forwards for link in chain(forward))
    return any(
        code is not None and code.co_qualname == "contextual_fp8_autocast.<locals>.forward" for code in codes
    )


def _wrapped_and_root(tree: Tree) -> tuple[nn.Module, ...]:
    return (*tree.root.wrappers, tree.root.module)


def _word(value: Any) -> str | None:
    """Read the value of an enum member, or the text itself."""
    value = getattr(value, "value", value)
    return None if value is None else str(value)
