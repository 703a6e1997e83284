"""Refuse a replica's writes to the user's objects before they happen.

A replica can reach the original if, for example, the training step names the model, its optimizer or its
scheduler. Every step of a trial refuses what costs no measured time to refuse. Single writes are refused in
first steps, and counted from then on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fp8doctor.loading.job import Job
from fp8doctor.stacks.tensors import tensors
from fp8doctor.trial.copies.replica import NotReplicable, OriginalTouched, unwrapped
from fp8doctor.trial.state.undisturbed import attached, parts
from fp8doctor.trial.state.user_state import OptimizerSettings, of_the_job, settings_of

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's operators that exchange tensors between processes."""

TRAINED = "a trained tensor of shape {} of your loss, step or optimizer; a loss that is a module is copied"

Refuse = Callable[[str], None]


class Guard:
    """The user's tensors and optimizers, and contexts in which they cannot be written."""

    def __init__(self, job: Job) -> None:
        job = job.sharded or job
        (_, *others), self._optimizers, trained = of_the_job(job)
        self._modules = dict(_root(job.model).named_modules())
        modules = {"the original": job.model} | {
            f"{type(each).__name__}, which the step names": each for each in others
        }
        self._parameters: dict[int, tuple[str, torch.Tensor]] = {}
        self._storages: dict[int, str] = {}
        self._counted: list[tuple[str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._refused: list[str] = []
        self._standing = False
        self._others = {each.ident for each in threading.enumerate()} - {threading.get_ident()}
        self.written: str | None = None
        """A write that was not refused; no further step runs after it."""
        for owner, module in modules.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._parameters.setdefault(id(tensor), (f"{name!r} of {owner}", tensor))
        for tensor in trained:
            self._parameters.setdefault(id(tensor), (TRAINED.format(tuple(tensor.shape)), tensor))
        for name, tensor in self._parameters.values():
            self._keep(name, tensor, *attached(tensor))
            if tensor.is_leaf and tensor.grad is not None:
                self._keep(f"the gradient of {name}", tensor.grad)
        for optimizer in self._optimizers:
            held = (list(getattr(optimizer, "state", {}).values()), settings_of(optimizer))
            self._keep("the state of your optimizer", *tensors(held))
        self._keep("the batch", *tensors(job.batch))

    def _keep(self, name: str, *held: torch.Tensor) -> None:
        for each in held:
            for part in parts(each):
                self._storages.setdefault(part.untyped_storage()._cdata, name)
                if not part.is_inference():
                    self._counted.append((name, part))

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Refuse in every step to run the original, give it gradients, or step its optimizer or scheduler.

        These cost no measured time. `look` finds the writes.
        """
        self._versions = [part._version for _, part in self._counted]
        self._standing = True
        try:
            with ExitStack() as stack:
                _refuse_runs(stack, self._modules, self._refuse)
                _refuse_gradients(stack, self._parameters, self._refuse)
                _refuse_optimizer_steps(stack, self._is_the_users, self._refuse)
                _refuse_scheduler_steps(stack, self._is_the_users, self._refuse)
                yield
        finally:
            self._standing = False

    def look(self) -> None:
        """Raise `OriginalTouched` between two steps if one of them wrote to something of the user's."""
        if self.written is None and self._standing:
            for (name, part), version in zip(self._counted, self._versions, strict=True):
                if part._version != version:
                    self.written = f"it writes to {name}"
                    break
        if self.written is not None:
            raise OriginalTouched(self.written)

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Refuse every write too, for a first step.

        Raises `OriginalTouched` when one would begin, or at the end if the step swallows that.
        """
        self.look()
        settings, refused = OptimizerSettings(self._optimizers), len(self._refused)
        try:
            with ExitStack() as stack:
                if not self._standing:
                    stack.enter_context(self.standing())
                stack.enter_context(_Writes(self._storages, self._refuse))
                yield
                self.look()
        except Exception as error:
            if self._refused[refused:] and not isinstance(error, OriginalTouched):
                raise OriginalTouched(self._refused[refused]) from error
            raise
        finally:
            changed = settings.put_back()
        if self._refused[refused:]:
            raise OriginalTouched(self._refused[refused])
        if changed:
            raise OriginalTouched(f"it would change {changed[0]} of your optimizer")

    def _refuse(self, what: str) -> None:
        """Refuse it to the trial and to threads that its steps start, while the guard stands.

        The user's other threads may go on, and so may all if an interrupt has left a hook behind.
        """
        if self._standing and threading.get_ident() not in self._others:
            self._refused.append(what)
            raise OriginalTouched(what)

    def _is_the_users(self, optimizer: Any) -> bool:
        """Return whether this optimizer is the job's, or one over its parameters."""
        return any(optimizer is each for each in self._optimizers) or any(
            id(parameter) in self._parameters
            for group in getattr(optimizer, "param_groups", ())
            for parameter in group["params"]
        )


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that write to the user's storages, and collectives if there are several processes.

    Dynamo compiles under it as without it, and nothing is compiled again when it is gone
    (``ignore_compile_internals``, torch 2.9 on; ``is_infra_mode`` before).
    """

    supports_higher_order_operators = True

    def __init__(self, storages: Mapping[int, str], refuse: Refuse) -> None:
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
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    self._look_at(value)
        return func(*args, **kwargs)

    def _look_at(self, written: Any) -> None:
        for each in tree_iter(written):
            if isinstance(each, torch.Tensor):
                for part in parts(each):
                    name = self._storages.get(part.untyped_storage()._cdata)
                    if name is not None:
                        self._refuse(f"it would write to {name}")


def _refuse_runs(stack: ExitStack, modules: Mapping[str, nn.Module], refuse: Refuse) -> None:
    """Refuse to run a module of the original."""

    def before(name: str, module: nn.Module, arguments: Any) -> None:
        refuse(f"it runs {name!r} of the original" if name else "it runs the original itself")

    for name, module in modules.items():
        stack.callback(module.register_forward_pre_hook(functools.partial(before, name)).remove)


def _refuse_gradients(
    stack: ExitStack, parameters: Mapping[int, tuple[str, torch.Tensor]], refuse: Refuse
) -> None:
    """Refuse a backward that reaches a user's parameter, before it gets a gradient."""

    def reach(name: str, gradient: torch.Tensor) -> None:
        refuse(f"its backward would reach {name}")

    def remove(leaf: torch.Tensor, handle: Any, had_hooks: bool) -> None:
        handle.remove()
        if not had_hooks and not leaf._backward_hooks:
            leaf._backward_hooks = None

    for name, each in parameters.values():
        if each.requires_grad:
            had_hooks = each._backward_hooks is not None
            handle = each.register_hook(functools.partial(reach, name))  # type: ignore[no-untyped-call]
            stack.callback(remove, each, handle, had_hooks)


def _refuse_optimizer_steps(stack: ExitStack, is_the_users: Callable[[Any], bool], refuse: Refuse) -> None:
    def before(optimizer: Any, arguments: Any, settings: Any) -> None:
        if not torch.compiler.is_compiling() and is_the_users(optimizer):
            refuse(f"it would step your optimizer ({type(optimizer).__name__})")

    stack.callback(register_optimizer_step_pre_hook(before).remove)


def _refuse_scheduler_steps(stack: ExitStack, is_the_users: Callable[[Any], bool], refuse: Refuse) -> None:
    def guarded(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def instead(self: Any, *arguments: Any, **settings: Any) -> Any:
            if is_the_users(getattr(self, "optimizer", None)):
                refuse(f"it would step your learning-rate scheduler ({type(self).__name__})")
            return step(self, *arguments, **settings)

        return instead

    steps = {kind: vars(kind)["step"] for kind in _kinds(LRScheduler) if "step" in vars(kind)}
    for kind, step in steps.items():
        stack.callback(setattr, kind, "step", step)
        kind.step = guarded(step)  # type: ignore[method-assign]


def _kinds(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    """List a class and its subclasses."""
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _root(model: nn.Module) -> nn.Module:
    """Return the user's own root module; the model itself if it is sharded, which is refused later."""
    try:
        return unwrapped(model)
    except NotReplicable:
        return model
