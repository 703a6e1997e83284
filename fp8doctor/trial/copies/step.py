"""A variant of the training step and its plan; and its step: forward, loss, backward and optimizer, as in the
user's own."""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from fp8doctor.loading.job import Job
from fp8doctor.stacks.looking import innermost, parameters_in
from fp8doctor.stacks.tensors import with_tensors
from fp8doctor.trial.copies.compiling import own_step
from fp8doctor.trial.copies.replica import NotReplicable, replicate, shared_by_copies
from fp8doctor.wording import sentence


class Place(IntEnum):
    """The order in which variants are built. The first four decide; others have to fit into the budget."""

    AS_IS = 1
    OWN_BF16 = 2
    """BF16 in the user's own form of compilation; of a BF16 job that is the step as it is."""
    PLAN = 3
    """FP8 with the plan, and BF16 with what of it helps BF16 too; of a BF16 job its best conversion."""
    OTHER_BF16 = 4
    """BF16 compiled by block; BF16 once more, as a check; both compiled whole, if the host sets the pace."""
    NO_CHECKPOINTING = 5
    """Without checkpointing, BF16 and FP8, if more than half of the memory is free; else after all others."""
    REST = 6
    """Each fix alone, other recipes, and what no finding asked for."""

    @property
    def decides(self) -> bool:
        return self <= Place.OTHER_BF16


@dataclass(frozen=True)
class Variant:
    """What a treatment may change in one variant of the training step."""

    model: nn.Module
    """A replica. It shares its parameters with the other variants unless a treatment replaces them."""
    batch: Any
    """On the device of the trial."""
    autocast: torch.dtype | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around every forward and loss, inside the autocast, such as ``te.autocast``."""
    throughout: Callable[[], AbstractContextManager[object]] = nullcontext
    """Around the whole step, backward and update too, outside the autocast."""
    fused: bool = False
    """Whether its optimizer is fused, and not that of the job."""
    step_as_compiled: bool = True
    """Whether a training step that the user compiled stays compiled."""


Change = Callable[[Variant], Variant]


def as_it_is(variant: Variant) -> Variant:
    return variant


@dataclass(frozen=True)
class VariantPlan:
    """The plan of one variant: its name, how it is made, and what must be seen in it."""

    name: str
    make: Change
    treatments: tuple[str, ...] = ()
    """Treatments on top of its base; empty for a baseline or a mere measurement."""
    fp8: bool | None = None
    base: str | None = None
    """The variant that it changes; None if it changes none."""
    explored: bool = False
    """Whether no finding proposed it."""
    compiled: bool = False
    """Whether compiled regions must be seen in it."""
    by_block: bool = False
    """Whether it compiles single blocks instead of following the user's own marks."""
    place: Place = Place.REST
    if_host_waits: bool = False
    """Whether it is built only if the fastest compiled step waits for the host."""


_log = logging.getLogger("fp8doctor")

RATE = 1e-12
"""Learning rate of every replica: too small to move a weight, so rounds are comparable, but not 0. With 0 and
1e-30 fused AdamW is slower: its step of an 8B Llama took 53.8 instead of 43.9 ms (H200, torch 2.11)."""


def move(batch: Any, device: torch.device) -> Any:
    """Copy the batch to ``device``. One with a method ``to``, such as a graph library's, moves itself."""
    shared = shared_by_copies(batch)
    moves_itself = not isinstance(batch, (torch.Tensor, nn.Module)) and id(batch) not in shared
    if moves_itself and callable(getattr(batch, "to", None)):
        try:
            return copy.deepcopy(batch, shared).to(device)
        except Exception:  # of a class of the user's or a library's
            _log.debug("a batch of %s does not move itself", type(batch), exc_info=True)
    return with_tensors(batch, lambda tensor: tensor.detach().to(device, copy=True))


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model: mappings are keyword arguments, tuples positional, others the only argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def own_loss(loss: Any, device: torch.device) -> Any:
    """Return the loss; copied if it is a module or its method, which may have parameters and buffers."""
    module = loss.__self__ if isinstance(loss, MethodType) else loss
    if not isinstance(module, nn.Module):
        return loss
    try:
        copied = replicate(module, device=device)[0]
    except NotReplicable as error:
        raise NotReplicable(f"the loss: {error}") from error
    return MethodType(loss.__func__, copied) if isinstance(loss, MethodType) else copied


def carried_loss(output: Any) -> Any:
    """Return the output's own ``loss``, or None."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def loss_of(job: Job, output: Any, batch: Any) -> torch.Tensor:
    """Compute the user's loss, else the output's own ``loss``, else the mean of the output."""
    if job.loss is not None:
        return cast(torch.Tensor, job.loss(output, batch))
    if (loss := carried_loss(output)) is not None:
        return cast(torch.Tensor, loss)
    first = output
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values())) if isinstance(first, Mapping) else first[0]
    return first.float().mean()


def training_step(
    job: Job,
    variant: Variant,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    before_backward: Callable[[], None] = lambda: None,
) -> Callable[[], torch.Tensor]:
    """Return one step of this variant, which returns its loss.

    The output stays alive during the backward, as with ``output = model(batch)`` in a user's loop: logits
    count in the memory peak. ``before_backward`` is called once per micro-batch.
    """
    model, batch = variant.model, variant.batch
    own = own_step(job.training_step, as_compiled=variant.step_as_compiled)
    casts = partial(torch.autocast, device.type, dtype=variant.autocast) if variant.autocast else nullcontext

    def step() -> torch.Tensor:
        with variant.throughout():
            for _ in range(job.workload.accumulate):
                with casts(), variant.around():
                    output = None if own else call(model, batch)
                    loss = own(model, batch) if own else loss_of(job, output, batch)
                before_backward()
                loss.backward()
                del output
            try:
                optimizer.step()
            except Exception as error:
                of_the_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error)
                if job.optimizer is not None or of_the_gpu:  # an earlier kernel may have caused it
                    raise
                raise NotReplicable(
                    f"the optimizer that fp8doctor chose for it raises {sentence(error)}; give yours, as "
                    "build_optimizer(model) in a model file"
                ) from error
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    return step


def optimizer_for(
    job: Job, parameters: Iterable[nn.Parameter], memo: Mapping[int, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of the user's class and settings over a replica's parameters, at the rate `RATE`.

    Without one: AdamW, fused if possible. Raises `NotReplicable` if nothing is trained, or if the optimizer
    cannot step by itself.
    """
    trained = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    if not trained:
        raise NotReplicable("no parameter of the model is trained, so there is no step to time")
    if job.optimizer is None:
        fused = all(each.is_floating_point() for each in trained.values())  # torch fuses no complex ones
        return torch.optim.AdamW(list(trained.values()), lr=RATE, fused=fused or None)
    kind: Any = type(innermost(job.optimizer))
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise NotReplicable(
            f"its optimizer {kind.__name__} takes a closure, and the steps that are timed give it none"
        )
    counterparts = {key: trained[id(each)] for key, each in memo.items() if id(each) in trained}
    return like(job.optimizer, counterparts, {"lr": RATE}, kind)


def like(
    optimizer: torch.optim.Optimizer,
    counterparts: Mapping[int, nn.Parameter],
    settings: Mapping[str, Any],
    kind: Any = None,
) -> torch.optim.Optimizer:
    """Make an optimizer like another over the trained counterparts of its parameters, by their ``id``.

    ``kind`` is another class. Raises `NotReplicable` if it would step nothing.
    """
    kind, groups = kind or type(optimizer), []
    for group in optimizer.param_groups:
        held = [counterparts.get(id(parameter)) for parameter in group["params"]]
        if trained := [each for each in held if each is not None and each.requires_grad]:
            groups.append({**group, "params": trained, **settings})
    if not groups:
        raise NotReplicable(
            f"its optimizer {kind.__name__} holds none of the parameters that are trained; it may hold copies"
        )
    takes = inspect.signature(kind.__init__).parameters
    accepted = {key: value for key, value in optimizer.defaults.items() if key in takes}
    return cast(torch.optim.Optimizer, kind(groups, **{**accepted, **settings}))


Step = Callable[[], torch.Tensor]


class WatchedSteps:
    """A step whose loss and gradients are watched; its update sees finite ones only.

    All variants share one set of weights, and with it a NaN. Nothing is read from the device before
    `non_finite` is called.
    """

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer) -> None:
        self._step, self._optimizer = step, optimizer
        self._finite: dict[str, list[torch.Tensor]] = {"loss": [], "gradients": []}
        """Whether each was finite, by steps."""

    def __call__(self) -> torch.Tensor:
        with before_the_update(self._optimizer, self._look):
            loss = self._step()
        self._finite["loss"].append(loss.isfinite().all())
        return loss

    def _look(self, gradients: list[torch.Tensor]) -> None:
        largest = [torch.linalg.vector_norm(each, torch.inf) for each in gradients]
        self._finite["gradients"].append(torch.stack([each.square().isfinite() for each in largest]).all())
        _clear(gradients)

    def non_finite(self) -> tuple[str, ...] | None:
        """Name what was NaN or infinite, ``loss`` or ``gradients`` or their squares; None if not seen."""
        if len(self._finite["gradients"]) < len(self._finite["loss"]):
            return None
        return tuple(name for name, seen in self._finite.items() if seen and not torch.stack(seen).all())

    def unwatched(self) -> Step:
        """Return the step itself, with its update still guarded if that was needed."""
        if "gradients" not in (self.non_finite() or ()):
            return self._step

        def kept_finite() -> torch.Tensor:
            with before_the_update(self._optimizer, _clear):
                return self._step()

        return kept_finite


@contextmanager
def before_the_update(
    optimizer: torch.optim.Optimizer, act: Callable[[list[torch.Tensor]], None]
) -> Iterator[None]:
    """Pass the gradients to ``act`` when the optimizer begins its step."""

    def hook(*_: Any) -> None:
        held = (each.grad for each in parameters_in(optimizer))
        found = [each._values() if each.is_sparse else each for each in held if each is not None]
        with suppress(RuntimeError, NotImplementedError, TypeError):
            act([each for each in found if each.numel()])

    with ExitStack() as stack:
        with suppress(AttributeError):  # of an optimizer that never called the constructor of torch's
            stack.callback(optimizer.register_step_pre_hook(hook).remove)
        yield


def _clear(gradients: list[torch.Tensor]) -> None:
    """Keep what an optimizer cannot square out of the weights, which all variants share.

    Seen: compiled blocks of a Gemma 3 1B had a gradient of 4e32, and Adam made weights of it that were NaN
    in every variant (H200, torch 2.11).
    """
    for each in gradients:
        torch.nan_to_num_(each, nan=0.0, posinf=0.0, neginf=0.0)
        if each.is_floating_point():
            largest = torch.finfo(each.dtype).max ** 0.5
            each.clamp_(-largest, largest)
