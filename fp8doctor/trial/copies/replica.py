"""Replicas: copies of a model, whole or truncated, that do not run the original or write to it.

`copy.deepcopy` alone does not give one (docs/traps.md): tensors go into its memo (cloned, or shared between
variants), wrappers around ``forward`` are rebuilt around the copy, and compile marks are applied again.
"""

import copy
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import acts_on_its_death, is_module, modules_of
from fp8doctor.stacks.torch_private import behind_compile, compile_call, compiled_call, context_of
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import Rebuilding
from fp8doctor.trial.copies.shards import InputCastHook, filled, is_stand_in
from fp8doctor.wording import error_in_words

DISTRIBUTED = ("DistributedDataParallel", "DataParallel")
"""Wrappers that are removed, because one process is timed."""

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DTensor", "DeepSpeedEngine")
"""Classes whose copies do other work; `fp8doctor.trial.copies.unsharded` makes plain models of some."""

ATOMIC = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, property),
    *(types.TracebackType, weakref.ref, str, bytes, int, float),
)
"""Classes of what `copy.deepcopy` takes as it is."""

GRAD_ASKING = frozenset(
    {"requires_grad_", "requires_grad", "is_leaf", "isinstance", "tuple", "torch", "Tensor"}
)
"""Names that a hook may use if it only asks for a gradient."""


class NotReplicable(Exception):
    """The model cannot be copied safely. The message names the part and the reason."""


class OriginalTouched(NotReplicable):
    """A replica ran a module of the original or wrote to one of its tensors."""


def replicate(
    model: nn.Module,
    *,
    device: torch.device | None = None,
    cuts: Mapping[str, int] | None = None,
    share: bool = False,
    stand_ins: Mapping[int, torch.Tensor] | None = None,
    fill: Callable[[dict[int, Any]], object] | None = None,
) -> tuple[nn.Module, dict[int, Any]]:
    """Copy ``model``; return the copy and the memo that maps ``id`` of each original object to its copy.

    A ``torch.compile`` wrapper is rebuilt around the copy, DistributedDataParallel is removed. Raises
    `NotReplicable` with the part and the reason.

    Args:
        device: Device of the copy's tensors; None keeps them on theirs.
        cuts: Name of a ModuleList -> how many blocks to keep, from the first on. The others are never copied.
        share: Keep the same Parameter and buffer objects, for variants that share one set of weights.
        stand_ins: ``id`` of a tensor -> its replacement, so it is not copied.
        fill: Puts copies of modules of `SHARDED` classes, which are refused without it, into the memo.
    """
    context, root = _unwrapped(model, refuse=fill is None)
    # A copy holds the same imported module as the original (``self.te = te``): deepcopy refuses to copy one.
    imported = {id(each): each for each in list(sys.modules.values()) if isinstance(each, types.ModuleType)}
    memo: dict[int, Any] = {**imported, **(stand_ins or {})}
    lists = {name: (root.get_submodule(name), count) for name, count in (cuts or {}).items()}
    left_out = {
        f"{name}.{key}.": block
        for name, (blocks, count) in lists.items()
        for key, block in list(blocks.named_children())[count:]
    }
    kept = [each for each in root.named_modules() if not f"{each[0]}.".startswith(tuple(left_out))]
    memo |= shared_by_copies(root, {*memo, *map(id, left_out.values())})
    _memoize_tensors(kept, memo, device, share)
    try:
        for blocks, _ in lists.values():  # all before one is copied: it may reach the others
            if type(blocks) not in (nn.ModuleList, nn.Sequential):
                raise NotReplicable(f"a {type(blocks).__name__} cannot be cut")
            memo[id(blocks)] = type(blocks)()
        for blocks, count in lists.values():
            for number, block in enumerate(list(blocks.children())[:count]):
                memo[id(blocks)].add_module(str(number), copy.deepcopy(block, memo))
            memo[id(blocks)].training = blocks.training
        if fill is not None:
            fill(memo)
        replica = copy.deepcopy(root, memo)
    except Exception as error:
        raise NotReplicable(f"copying it raises {error_in_words(error)}") from error
    for _, module in kept:
        copied = memo.get(id(module))
        if isinstance(copied, nn.Module):
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                hooks = getattr(copied, kind)
                for key in [key for key, hook in hooks.items() if not _stays(hook)]:
                    del hooks[key]
            for name, value in module.__dict__.items():  # a LoRA keeps the forward that it replaced
                if name == "forward" or (isinstance(value, types.FunctionType) and context_of(value) is None):
                    copied.__dict__[name] = Rebuilding(memo).of(value)
            if (mark := context_of(compiled_call(module))) is not None:
                compile_call(copied, mark)
    return (context(replica) if context else replica), memo


def unwrapped(model: nn.Module, *, refuse: bool = True) -> nn.Module:
    """Return the user's own root module. Raises `NotReplicable` if it is sharded, if it is to ``refuse``."""
    return _unwrapped(model, refuse=refuse)[1]


def shared_by_copies(root: Any, known: Iterable[int] = ()) -> dict[int, Any]:
    """Find the objects in ``root`` that act on their death, by their ``id``, except for those ``known``.

    They are not copied. Raises `NotReplicable` for a module: a copy needs tensors of its own.
    """
    seen, left, shared = set(known), [root], dict[int, Any]()
    while left:
        value = left.pop()
        if id(value) in seen or issubclass(type(value), ATOMIC):
            continue
        seen.add(id(value))
        if not acts_on_its_death(type(value)):
            left += gc.get_referents(value)
        elif issubclass(type(value), nn.Module):
            names = {id(each): name for name, each in modules_of(root)} if is_module(root) else {}
            raise NotReplicable(
                f"copies of its module {names.get(id(value)) or type(value).__qualname__} would run the "
                "module's __del__; move __del__ to a class that is no module, whose objects the copies share"
            )
        else:
            shared[id(value)] = value
    return shared


def _unwrapped(model: nn.Module, *, refuse: bool) -> tuple[Any, nn.Module]:
    """Return the compile context of an outer wrapper, if any, and the user's own root module."""
    context = None
    while True:
        names = {cls.__name__ for cls in type(model).__mro__}
        if (inside := behind_compile(model)) is not None:
            context, model = context_of(model), inside
        elif names.intersection(DISTRIBUTED):
            model = model.module  # type: ignore[assignment]
        elif refuse and (found := names.intersection(SHARDED)):
            raise NotReplicable(f"it is sharded over processes ({found.pop()})")
        else:
            return context, model


def _memoize_tensors(
    modules: Sequence[tuple[str, nn.Module]], memo: dict[int, Any], device: torch.device | None, share: bool
) -> None:
    """Put the copy of every tensor into the memo; those that fill one piece of memory are copied with it.

    Transformer Engine keeps query, key and value weights next to each other. Otherwise it joins them in every
    step: 0.4 GiB in eight layers of 4096 (2.20 on an H200).
    """
    pieces: dict[int, dict[int, torch.Tensor]] = {}
    for name, module in modules:
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in memo:
                continue
            if any(cls.__name__ in SHARDED for cls in type(tensor).__mro__):
                raise NotReplicable(f"{name}.{key} is sharded over processes ({type(tensor).__name__})")
            plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
            if share:
                memo[id(tensor)] = tensor
            elif is_stand_in(tensor) and device is not None:
                memo[id(tensor)] = _like(tensor, filled(tensor, device))
            elif tensor.is_meta and device is not None and device.type != "meta":
                raise NotReplicable(f"{name}.{key} has no data (meta device)")
            elif plain and not tensor.is_meta and device in (None, tensor.device) and tensor.numel():
                pieces.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
            else:
                memo[id(tensor)] = _like(tensor, tensor.detach().to(device or tensor.device, copy=True))
        for value in module.__dict__.values():
            if isinstance(value, torch.Tensor) and not value.is_leaf and id(value) not in memo:
                memo[id(value)] = value.detach().to(device or value.device, copy=True)
    for together in pieces.values():
        storage = next(iter(together.values())).untyped_storage()
        fill = len(together) > 1 and storage.nbytes() <= sum(each.nbytes for each in together.values())
        copied = storage.clone() if fill else None  # type: ignore[no-untyped-call]
        for tensor in together.values():
            if copied is None:
                data = tensor.detach().to(tensor.device, copy=True)
            else:
                data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                data.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
            memo[id(tensor)] = _like(tensor, data)


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Make the copied data a Parameter if the tensor is one, with its attributes."""
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    for key, value in tensor.__dict__.items():  # such as Megatron's ``main_grad``, which fused GEMMs add to
        is_tensor = isinstance(value, torch.Tensor)
        parameter.__dict__[key] = value.detach().to(data.device, copy=True) if is_tensor else value
    return parameter


def _stays(hook: Any) -> bool:
    """Return whether a hook is torch's, stands for one of FSDP's, or only calls ``requires_grad_``.

    transformers' ``enable_input_require_grads`` and PEFT register such a function on the embedding: adapters
    on a frozen model under checkpointing need it. The names in its code tell.
    """
    module = getattr(hook, "__module__", None) or type(hook).__module__
    if isinstance(hook, InputCastHook) or module.startswith("torch."):
        return True
    if not isinstance(hook, types.FunctionType):
        return False
    names = set(names_in(hook.__code__))
    reaches = hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__
    return "requires_grad_" in names <= GRAD_ASKING and not reaches


def cut_of(job: Job, cut: depth.Cut, device: torch.device) -> tuple[Job, nn.Module, Mapping[int, Any]]:
    """Truncate the model on the device, by the model file's function or by a copy.

    Returns the job that it belongs to, the truncated model, and the memo from that job's parameters to its
    own.
    """
    of, cuts = job, cut
    if job.rebuild is not None and len(cut) == 1:
        ((name, blocks),) = cut.items()
        try:
            with device:
                model, optimizer = job.rebuild(blocks)
            depth.compare(unwrapped(job.model), unwrapped(model), name, blocks)
        except UserError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error
            if any(parameter.is_meta for parameter in job.model.parameters()):
                raise NotReplicable(
                    f"the model file's own cut to {blocks} blocks cannot be used: {error}"
                ) from error
        else:
            of, cuts = replace(job, model=model, optimizer=optimizer), {}
    here = of is not job and all(
        tensor.device == device for tensor in (*of.model.parameters(), *of.model.buffers())
    )
    if here:
        return of, of.model, {id(parameter): parameter for parameter in of.model.parameters()}
    return of, *replicate(of.model, device=device, cuts=cuts)
