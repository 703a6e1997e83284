"""Replicas: copies of a model, or of a cut of it, that provably do not run the original or write to it.

`copy.deepcopy` alone is not such a copy: a wrapped ``forward`` keeps its closure over the original, an
in-place compile mark vanishes, hooks write to the user's lists, and every parameter exists twice. So tensors
are handed to it through the memo (cloned, or shared between arms), wrappers around ``forward`` are rebuilt
around the copy, compile marks are applied again with the very settings they had, the user's hooks are left
out but for those that only ask for a gradient, and a `Tripwire` guards the first step.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fp8doctor.stacks.torch_private import behind_compile, compile_call, compiled_call, context_of, original
from fp8doctor.trial.copies.compiling import clone_function
from fp8doctor.wording import error_in_words

DISTRIBUTED = ("DistributedDataParallel", "DataParallel")
"""Wrappers that are taken off: one process is timed."""

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DTensor", "DeepSpeedEngine")
"""Classes whose copies are not the same work: the model is refused."""


GRAD_ASKING = frozenset(
    {"requires_grad_", "requires_grad", "is_leaf", "isinstance", "tuple", "torch", "Tensor"}
)
"""Names that a hook may use which does nothing but ask for a gradient."""


class NotReplicable(Exception):
    """The model cannot be copied safely. The message names the part and the reason."""


class OriginalTouched(Exception):
    """A replica ran a module of the original or wrote to one of its tensors."""


def replicate(
    model: nn.Module,
    *,
    device: torch.device | None = None,
    cuts: Mapping[str, Sequence[int]] | None = None,
    share: bool = False,
    stand_ins: Mapping[int, torch.Tensor] | None = None,
) -> tuple[nn.Module, dict[int, Any]]:
    """A copy of ``model``, and the memo that maps ``id`` of each original object to its copy.

    Args:
        model: The module as the user calls it. A ``torch.compile`` wrapper around it is rebuilt around the
            copy, DistributedDataParallel is taken off.
        device: Where the tensors of the copy go; None keeps them where they are.
        cuts: Name of a ModuleList -> indices of the blocks to keep. The others are never copied.
        share: Keep the very Parameter and buffer objects, for arms that share one set of weights.
        stand_ins: ``id`` of a tensor -> what stands in its place, so that it is not copied.

    Raises:
        NotReplicable: naming the part and the reason.
    """
    wrapper_context, root = _unwrap(model)
    memo: dict[int, Any] = {**_imported(), **(stand_ins or {})}
    dropped = {
        f"{name}.{i}"
        for name, keep in (cuts or {}).items()
        for i in range(len(root.get_submodule(name)))  # type: ignore[arg-type]
        if i not in keep
    }
    kept = [(name, module) for name, module in root.named_modules() if not _below(name, dropped)]
    if not share:
        _memoize_neighbours([module for _, module in kept], memo, device)
    for name, module in kept:
        _memoize_tensors(name, module, memo, device, share)
    marks = {name: context for name, module in kept if (context := context_of(compiled_call(module)))}
    try:
        for name, keep in (cuts or {}).items():
            _memoize_cut(root.get_submodule(name), keep, memo)
        replica = copy.deepcopy(root, memo)
    except Exception as error:
        raise NotReplicable(f"copying it raises {error_in_words(error)}") from error
    for _name, module in kept:
        twin = memo.get(id(module))
        if isinstance(twin, nn.Module):
            _drop_foreign_hooks(twin)
            if "forward" in module.__dict__:
                twin.__dict__["forward"] = rebind(module.__dict__["forward"], memo)
    for name, context in marks.items():
        compile_call(memo[id(root.get_submodule(name))], context)
    return (wrapper_context(replica) if wrapper_context else replica), memo


def _imported() -> dict[int, Any]:
    """Let a copy hold the very module that the original imported, such as ``self.te = te``, which
    `copy.deepcopy` refuses."""
    return {id(each): each for each in list(sys.modules.values()) if isinstance(each, types.ModuleType)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own root module, ``torch.compile`` and DistributedDataParallel taken off. Raises
    `NotReplicable` when sharded."""
    return _unwrap(model)[1]


def _unwrap(model: nn.Module) -> tuple[Any, nn.Module]:
    """Return the compile context of an outer wrapper, if any, and the user's own root module."""
    context = None
    while True:
        names = {cls.__name__ for cls in type(model).__mro__}
        if (inside := behind_compile(model)) is not None:
            context, model = context_of(model), inside
        elif names.intersection(DISTRIBUTED):
            model = model.module  # type: ignore[assignment]
        elif found := names.intersection(SHARDED):
            raise NotReplicable(f"it is sharded over processes ({found.pop()})")
        else:
            return context, model


def _below(name: str, dropped: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in dropped)


def _memoize_neighbours(
    modules: Sequence[nn.Module], memo: dict[int, Any], device: torch.device | None
) -> None:
    """Copy tensors that share one piece of memory with that piece, where they are all of it and stay on their
    device.

    Transformer Engine keeps the weights of query, key and value side by side, and joins them in every step
    where they are not: 0.4 GiB in eight layers of 4096 (2.20 on an H200).
    """
    pieces: dict[int, dict[int, torch.Tensor]] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo and _lies_on(device, tensor):
                pieces.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    for together in pieces.values():
        storage = next(iter(together.values())).untyped_storage()
        if len(together) == 1 or storage.nbytes() > sum(each.nbytes for each in together.values()):
            continue
        copied = storage.clone()  # type: ignore[no-untyped-call]
        for tensor in together.values():
            data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            data.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
            memo[id(tensor)] = _like(tensor, data)


def _lies_on(device: torch.device | None, tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor with memory, where its copy will be."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    there = plain and not tensor.is_meta and tensor.untyped_storage().nbytes() > 0
    return there and device in (None, tensor.device)


def _memoize_tensors(
    name: str, module: nn.Module, memo: dict[int, Any], device: torch.device | None, share: bool
) -> None:
    """Decide for every tensor of one module what stands in its place in the copy."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or id(tensor) in memo:
            continue
        if any(cls.__name__ in SHARDED for cls in type(tensor).__mro__):
            raise NotReplicable(f"{name}.{key} is sharded over processes ({type(tensor).__name__})")
        if tensor.is_meta and device is not None and device.type != "meta":
            raise NotReplicable(f"{name}.{key} has no data (meta device)")
        memo[id(tensor)] = tensor if share else _copy_of(tensor, device)
    for value in module.__dict__.values():
        if isinstance(value, torch.Tensor) and not value.is_leaf and id(value) not in memo:
            memo[id(value)] = value.detach().to(device or value.device, copy=True)


def _copy_of(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return _like(tensor, tensor.detach().to(device or tensor.device, copy=True))


def _like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Make of the copied data what the tensor is, with what is attached to it."""
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    attached = tensor.__dict__.items()  # such as Megatron's ``main_grad``, which fused GEMMs add to
    parameter.__dict__.update(
        {
            key: value.detach().to(data.device, copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in attached
        }
    )
    return parameter


def _memoize_cut(blocks: nn.Module, keep: Sequence[int], memo: dict[int, Any]) -> None:
    """Put a list with only the kept blocks in place of ``blocks``."""
    children = list(blocks.children())
    short = type(blocks)() if type(blocks) in (nn.ModuleList, nn.Sequential) else None
    if short is None:
        raise NotReplicable(f"a {type(blocks).__name__} cannot be cut")
    memo[id(blocks)] = short
    for i, index in enumerate(keep):
        short.add_module(str(i), copy.deepcopy(children[index], memo))
    short.training = blocks.training


def _drop_foreign_hooks(module: nn.Module) -> None:
    """Remove the hooks that the user registered; torch's own (weight norm, parametrisations) stay, and what
    the gradients of a step start with."""
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        hooks = getattr(module, kind)
        for key in [
            key for key, hook in hooks.items() if not (_is_torchs(hook) or _only_asks_for_grad(hook))
        ]:
            del hooks[key]
            for flags in (
                "_forward_hooks_with_kwargs",
                "_forward_hooks_always_called",
                "_forward_pre_hooks_with_kwargs",
            ):
                getattr(module, flags, {}).pop(key, None)


def _is_torchs(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.startswith("torch.")


def _only_asks_for_grad(hook: Any) -> bool:
    """Whether a hook does nothing but call ``requires_grad_``, by the names in its code and for want of
    anything else that it could reach.

    Adapters on a frozen model under checkpointing need it: transformers' ``enable_input_require_grads`` and
    PEFT hang such a function on the embedding.
    """
    if not isinstance(hook, types.FunctionType):
        return False
    names = set(_names_in(hook.__code__))
    reaches = hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__
    return "requires_grad_" in names <= GRAD_ASKING and not reaches


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names in the code of a function, and in that of the functions that are written in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_in(each)


def rebind(function: Any, memo: Mapping[int, Any]) -> Any:
    """Rebuild ``function`` with every module, bound method and function it closes over replaced by its copy;
    what closes over none stays."""
    return _Rebinding(memo).of(function)


class _Rebinding:
    """Functions rebuilt, each once: one that closes over itself closes over its copy."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, types.FunctionType] = {}

    def of(self, value: Any) -> Any:
        if not self._reaches_a_copy(value, set()):
            return value
        if isinstance(value, types.MethodType):
            owner = self._memo.get(id(value.__self__), value.__self__)
            return types.MethodType(self.of(value.__func__), owner)
        if isinstance(value, functools.partial):
            arguments = [self.of(each) for each in value.args]
            named = {key: self.of(each) for key, each in value.keywords.items()}
            return functools.partial(self.of(value.func), *arguments, **named)
        if isinstance(value, types.FunctionType):
            context = context_of(value)
            if context is not None:
                return context(self.of(original(value)))
            return self._made.get(id(value)) or self._clone(value)
        return self._memo[id(value)]

    def _reaches_a_copy(self, value: Any, seen: set[int]) -> bool:
        """Whether anything in it has to be replaced; a compiled function always, so that it is compiled
        anew."""
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            return context_of(value) is not None or self._any_reaches(_closed_over(value), seen)
        if isinstance(value, types.MethodType):
            return id(value.__self__) in self._memo or self._reaches_a_copy(value.__func__, seen)
        if isinstance(value, functools.partial):
            return self._any_reaches((value.func, *value.args, *value.keywords.values()), seen)
        return isinstance(value, nn.Module) and id(value) in self._memo

    def _any_reaches(self, values: Iterable[Any], seen: set[int]) -> bool:
        return any(self._reaches_a_copy(each, seen) for each in values)

    def _clone(self, function: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        clone = self._made[id(function)] = clone_function(function, cells)
        for new, old in zip(cells, function.__closure__ or (), strict=True):
            if old != types.CellType():
                new.cell_contents = self.of(old.cell_contents)
        if "__wrapped__" in clone.__dict__:
            clone.__dict__["__wrapped__"] = self.of(clone.__dict__["__wrapped__"])
        return clone


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    """List what a function closes over, and what it wraps."""
    for cell in function.__closure__ or ():
        if cell != types.CellType():
            yield cell.cell_contents
    yield function.__dict__.get("__wrapped__")


class Tripwire:
    """Watches the original while a replica takes a step."""

    def __init__(self, original: nn.Module) -> None:
        self._modules = dict(original.named_modules())
        self._tensors = dict((*original.named_parameters(), *original.named_buffers()))

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raises `OriginalTouched` before a module of the original runs, and at the end when one of its
        tensors was written."""
        ran: list[str] = []

        def note(what: str) -> None:
            ran.append(what)
            raise OriginalTouched(what)

        before = {
            name: (tensor._version, id(tensor.grad), _grad_version(tensor))
            for name, tensor in self._tensors.items()
        }
        with self.watching(note):
            yield
        if ran:
            raise OriginalTouched(ran[0])
        for name, tensor in self._tensors.items():
            if before[name] != (tensor._version, id(tensor.grad), _grad_version(tensor)):
                raise OriginalTouched(f"it writes to {name!r} of the original")

    @contextmanager
    def watching(self, refuse: Callable[[str], None]) -> Iterator[None]:
        """Tell ``refuse`` before a module of the original runs."""

        def before(name: str, module: nn.Module, arguments: Any) -> None:
            refuse(_runs(name))

        handles = [
            module.register_forward_pre_hook(functools.partial(before, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _runs(name: str) -> str:
    return f"it runs {name!r} of the original" if name else "it runs the original itself"


def _grad_version(tensor: torch.Tensor) -> int | None:
    return None if tensor.grad is None else tensor.grad._version
