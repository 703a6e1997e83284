"""The training step of an arm: forward, loss, backward, optimizer, the way the user's own step does it."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from fp8doctor.loading.job import Job
from fp8doctor.stacks.held_tensors import with_tensors
from fp8doctor.trial.copies.compiling import own_step
from fp8doctor.trial.copies.replica import NotReplicable, replicate
from fp8doctor.trial.variant import Variant
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

RATE = 1e-12
"""Learning rate of every replica: too small to move a weight, so that rounds compare, and not 0. With 0, and
with 1e-30, fused AdamW is slower: its step of an 8B Llama took 53.8 instead of 43.9 ms on an H200 (torch
2.11), which made every predicted step 10 ms too long."""


def move(batch: Any, device: torch.device) -> Any:
    """Copy the batch to ``device``, so that a step may write into it; containers keep their kind, and what
    knows by itself how it moves does."""
    if _moves_itself(batch):
        try:
            return copy.deepcopy(batch).to(device)
        except Exception:  # of a class of the user's or a library's
            _log.debug("a batch of %s does not move itself", type(batch), exc_info=True)
    return with_tensors(batch, lambda tensor: tensor.detach().to(device, copy=True))


def _moves_itself(batch: Any) -> bool:
    """Whether it is no tensor and has a method ``to``, as packed sequences and the batches of graph libraries
    have."""
    return not isinstance(batch, (torch.Tensor, nn.Module)) and callable(getattr(batch, "to", None))


def call(model: nn.Module, batch: Any) -> Any:
    """Call the model: mappings are keyword arguments, tuples positional, anything else is the one
    argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple):
        return model(*batch)
    return model(batch)


def own_loss(loss: Any, device: torch.device) -> Any:
    """Return the loss, or a copy where it is a module or a method of one, which may have parameters and
    buffers.

    Raises `NotReplicable`.
    """
    module = loss.__self__ if isinstance(loss, MethodType) else loss
    if not isinstance(module, nn.Module):
        return loss
    try:
        copied = replicate(module, device=device)[0]
    except NotReplicable as error:
        raise NotReplicable(f"the loss: {error}") from error
    return MethodType(loss.__func__, copied) if isinstance(loss, MethodType) else copied


def loss_of(job: Job, output: Any, batch: Any) -> torch.Tensor:
    """Compute the user's loss, else the output's own ``loss``, else the mean of what the model returned."""
    if job.loss is not None:
        return cast(torch.Tensor, job.loss(output, batch))
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return cast(torch.Tensor, loss)
    first = output
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values())) if isinstance(first, Mapping) else first[0]
    return first.float().mean()


def _nothing() -> None:
    """Do nothing before a backward."""


def training_step(
    job: Job,
    variant: Variant,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    before_backward: Callable[[], None] = _nothing,
) -> Callable[[], torch.Tensor]:
    """Take one step of the job in this variant: every micro-batch forward and backward, then the optimizer.

    Returns the loss. The output stays alive during the backward, as it does in ``output = model(batch)`` of a
    user's loop: logits count in the peak of memory. ``before_backward`` is called once a micro-batch.
    """

    model, batch = variant.model, variant.batch
    own = own_step(job.training_step, as_compiled=variant.step_as_compiled)

    def step() -> torch.Tensor:
        for _ in range(job.workload.accumulate):
            with (
                torch.autocast(device.type, dtype=variant.autocast) if variant.autocast else nullcontext(),
                variant.around(),
            ):
                output = None if own else call(model, batch)
                loss = own(model, batch) if own else loss_of(job, output, batch)
            before_backward()
            loss.backward()
            del output
        with _made_up() if job.optimizer is None else nullcontext():
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@contextmanager
def _made_up() -> Iterator[None]:
    """Blame an optimizer that nobody gave for what it raises, but not for the GPU or its memory. Raises
    `NotReplicable`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if "CUDA error" in str(error):  # which a kernel before it may have met
            raise
        raise NotReplicable(
            f"the optimizer that was made up for it raises {sentence(error)}; give yours, as "
            "build_optimizer(model) in a model file"
        ) from error


def optimizer_for(
    job: Job, parameters: Iterable[nn.Parameter], memo: Mapping[int, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of the user's class and settings over a replica's parameters, with the learning rate
    `RATE`.

    Without one: AdamW over the trainable parameters, fused where it can be. Raises `NotReplicable` when
    nothing is trained, or the optimizer cannot step by itself.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise NotReplicable("no parameter of the model is trained, so there is no step to time")
    if job.optimizer is None:
        fused = all(parameter.is_floating_point() for parameter in trained)  # torch fuses no complex ones
        return torch.optim.AdamW(trained, lr=RATE, fused=fused or None)
    kept = {id(parameter) for parameter in trained}
    groups = []
    for group in job.optimizer.param_groups:
        twins = [memo[id(parameter)] for parameter in group["params"] if id(memo.get(id(parameter))) in kept]
        if twins:
            groups.append(
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    "params": twins,
                    "lr": RATE,
                }
            )
    kind = type(getattr(job.optimizer, "optimizer", job.optimizer))
    if not groups:
        raise NotReplicable(
            f"its optimizer {kind.__name__} holds none of the parameters that are trained; it may hold copies"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise NotReplicable(
            f"its optimizer {kind.__name__} takes a closure, and the steps that are timed give it none"
        )
    takes = inspect.signature(kind.__init__).parameters
    accepted = {key: value for key, value in job.optimizer.defaults.items() if key in takes and key != "lr"}
    return cast(torch.optim.Optimizer, kind(groups, lr=RATE, **accepted))


MADE_UP_RATE = 1e-4
"""Learning rate of a loss that is followed without an optimizer of the user's: what fine-tuning commonly
takes."""


def own_rates(job: Job, parameters: Iterable[nn.Parameter], memo: Mapping[int, Any]) -> list[float]:
    """Read the learning rates of the job's own optimizer, for each group that `optimizer_for` makes.

    Before a warm-up's first step, which is at 0, the rate that it leads to.
    """
    if job.optimizer is None:
        return [MADE_UP_RATE]
    kept = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return [
        float(group["lr"]) or float(group.get("initial_lr", 0.0))
        for group in job.optimizer.param_groups
        if any(id(memo.get(id(parameter))) in kept for parameter in group["params"])
    ]


def like(
    optimizer: torch.optim.Optimizer, twins: Mapping[int, nn.Parameter], settings: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer of the same class, groups and settings over the twins of its parameters, with
    ``settings`` changed.

    ``twins`` maps ``id`` of a parameter to what stands in its place; those that are not trained are left out.
    """
    kind, taken = type(optimizer), inspect.signature(type(optimizer).__init__).parameters
    groups = []
    for group in optimizer.param_groups:
        trained = [
            twin
            for parameter in group["params"]
            if (twin := twins.get(id(parameter))) is not None and twin.requires_grad
        ]
        if trained:
            groups.append(
                {
                    **{key: value for key, value in group.items() if key != "params"},
                    **settings,
                    "params": trained,
                }
            )
    defaults = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return kind(groups, **{**defaults, **settings})
