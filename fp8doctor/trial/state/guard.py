"""Refuse a replica's writes to the user's objects, which a training step may name, before they happen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import parameters_in
from fp8doctor.stacks.tensors import has_data, plain, tensors
from fp8doctor.trial.copies.replica import OriginalTouched, unwrapped
from fp8doctor.trial.state.users import of_the_job

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's operators that exchange tensors between processes."""

WORD, CHUNK = 8, 2**24
"""Bytes of the words that are summed, and most single bytes at once: torch makes words of them first."""


class _Part(NamedTuple):
    """A plain tensor with data of the user's."""

    kind: str
    name: str
    tensor: torch.Tensor
    storage: int
    version: int | None

    @property
    def written(self) -> bool:
        return self.version is not None and self.tensor._version != self.version


class Guard:
    """The user's tensors and optimizers, contexts in which they cannot be written, and what was written."""

    def __init__(self, job: Job) -> None:
        job = job.sharded or job
        (_, *others), optimizers, trained = of_the_job(job)
        self._modules = dict(unwrapped(job.model, refuse=False).named_modules())
        self._tensors: dict[int, tuple[str, str, torch.Tensor]] = {}
        self._parts: list[_Part] = []
        self._refused: list[str] = []
        self._others = {each.ident for each in threading.enumerate()} - {threading.get_ident()}
        named = ((f"{type(each).__name__}, which the step names", each) for each in others)
        for owner, module in (("the original", job.model), *named):
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                kind = "parameters" if isinstance(tensor, nn.Parameter) else "buffers"
                self._tensors.setdefault(id(tensor), (kind, f"{name!r} of {owner}", tensor))
        for tensor in trained:
            words = f"a trained tensor of shape {tuple(tensor.shape)} of your loss, step or optimizer"
            words = f"{words}; a loss that is a module is copied"
            self._tensors.setdefault(id(tensor), ("parameters", words, tensor))
        for kind, name, tensor in self._tensors.values():
            self._note(kind, name, tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self._note("gradients", f"the gradient of {name}", tensor.grad)
        for optimizer in optimizers:
            groups = [dict(group, params=()) for group in getattr(optimizer, "param_groups", ())]
            held = tensors((list(getattr(optimizer, "state", {}).values()), groups))
            self._note("optimizer state", "the state of your optimizer", *held)
        self._note("batch", "the batch", *tensors(job.batch))

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """Copy nothing: its hooks are in the modules that replicas copy, and it holds every one of them."""
        return self

    def _note(self, kind: str, name: str, *held: torch.Tensor) -> None:
        for tensor in chain(*map(_plain, held)):
            version = None if tensor.is_inference() else tensor._version
            self._parts.append(_Part(kind, name, tensor, tensor.untyped_storage()._cdata, version))

    def sums(self) -> dict[int, int]:
        """Sum the words of each storage.

        This shows writes that no version counter counts (``.data``, kernels called by address). It takes 0.1
        s per GiB on two CPU cores (measured), and 5 ms for 16 GiB on a GPU at 3.3 TB/s (computed).
        """
        totals = {}
        for number, tensor in {part.storage: part.tensor for part in self._parts}.items():
            storage = tensor.untyped_storage()
            octets = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            whole = 0 if storage.data_ptr() % WORD else len(octets) // WORD * WORD
            single = octets[whole:].split(CHUNK)  # type: ignore[no-untyped-call]
            totals[number] = octets[:whole].view(torch.int64).sum()
            for each in single:
                totals[number] += each.sum(dtype=torch.int64)
        return {number: int(total) for number, total in totals.items()}

    def changed(self, before: dict[int, int]) -> list[str]:
        """Name the kinds of tensors that were written to since ``before``, the `sums` at the beginning."""
        now = self.sums()
        parts = self._parts
        return sorted(
            {each.kind for each in parts if each.written or before[each.storage] != now[each.storage]}
        )

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Refuse to run the original, give it gradients, or step its optimizer: no measured time."""
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._refuse_step).remove)
            for name, module in self._modules.items():
                words = f"it runs {name!r} of the original" if name else "it runs the original itself"
                stack.callback(module.register_forward_pre_hook(partial(self._refuse, words)).remove)
            for _, name, leaf in self._tensors.values():
                if leaf.requires_grad:
                    had_hooks = leaf._backward_hooks is not None
                    refuse = partial(self._refuse, f"its backward would reach {name}")
                    handle = leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
                    stack.callback(_remove, handle, leaf, had_hooks)
            yield

    def look(self) -> None:
        """Raise `OriginalTouched` between two steps if one of them wrote to something of the user's."""
        name = next((part.name for part in self._parts if part.written), None)
        if name is not None:
            raise OriginalTouched(f"it writes to {name}")

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Refuse every write too, for a first step while it stands; raise at the end if that is swallowed."""
        self.look()
        refused = len(self._refused)
        try:
            with _Writes({part.storage: part.name for part in reversed(self._parts)}, self._refuse):
                yield
                self.look()
        except Exception as error:
            if self._refused[refused:] and not isinstance(error, OriginalTouched):
                raise OriginalTouched(self._refused[refused]) from error
            raise
        if self._refused[refused:]:
            raise OriginalTouched(self._refused[refused])

    def _refuse(self, what: str, *_: object) -> None:
        """Refuse it to the trial and to threads that its steps start, not to the user's other threads."""
        if threading.get_ident() not in self._others:
            self._refused.append(what)
            raise OriginalTouched(what)

    def _refuse_step(self, optimizer: Any, arguments: Any, settings: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._tensors.keys().isdisjoint(map(id, parameters_in(optimizer))):
            self._refuse(f"it would step your optimizer ({type(optimizer).__name__})")


def _remove(handle: Any, leaf: torch.Tensor, had_hooks: bool) -> None:
    handle.remove()
    if not had_hooks and not leaf._backward_hooks:
        leaf._backward_hooks = None


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the plain tensors with data in a tensor: itself, or those that a subclass wraps."""
    for each in plain(tensor):
        if has_data(each) and each.layout is torch.strided:
            with suppress(NotImplementedError, RuntimeError):
                each.untyped_storage().data_ptr()
                yield each


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that write to the user's storages, and collectives if there are several processes.

    Dynamo compiles as without it (``ignore_compile_internals``, torch 2.9 on; ``is_infra_mode`` before).
    """

    supports_higher_order_operators = True

    def __init__(self, storages: Mapping[int, str], refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages, self._refuse = storages, refuse
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._several and getattr(func, "namespace", None) in COLLECTIVES:
            self._refuse(f"its step talks to other processes ({func}), which do not run this copy")
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[position] if position < len(args) else kwargs.get(argument.name)
                    whole = (each for each in tree_iter(written) if isinstance(each, torch.Tensor))
                    for part in chain.from_iterable(map(_plain, whole)):
                        if (name := self._storages.get(part.untyped_storage()._cdata)) is not None:
                            self._refuse(f"it would write to {name}")
        return func(*args, **kwargs)
