"""`inspect_model`: examine a live model in its process without changing it."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fp8doctor.diagnosis.diagnose import diagnose, hypotheses
from fp8doctor.errors import UserError, WrongType, in_one_sentence, require
from fp8doctor.facts import Network, Target, recorded
from fp8doctor.gpus import gpu_spec
from fp8doctor.loading.job import (
    Job,
    checked_accumulate,
    checked_autocast,
    checked_batch,
    is_optimizer,
    is_trainer,
    of_trainer,
)
from fp8doctor.loading.synthetic_batch import core, job_of
from fp8doctor.report import Report
from fp8doctor.stacks.looking import is_a, tensors_of
from fp8doctor.stacks.torch_private import without_modes
from fp8doctor.stages import BUDGET_S, progress_line, someone_watches

_IN_PROGRESS = threading.RLock()
"""Lets one thread inspect at a time: a trial has the model refuse to run."""


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock, suspend dispatch modes, and restore environment variables."""
    from fp8doctor.examine.environment import variables_put_back

    with _IN_PROGRESS, without_modes(), variables_put_back():
        yield


@in_one_sentence
@_alone()
def inspect_model(
    model: Any,
    batch: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    training_step: Callable[..., Any] | None = None,
    autocast: Any = None,
    accumulate: int = 1,
    trial: bool = True,
    budget_s: float | None = None,
    layers: int | None = None,
    device: str | None = None,
    assume_gpu: str | None = None,
    select: str | Sequence[str] | None = None,
    ignore: str | Sequence[str] | None = None,
    progress: bool = True,
) -> Report:
    """Explain what keeps FP8 from being faster on this model.

    Leaves the model and the process unchanged. ``model`` is a ``torch.nn.Module`` or a transformers Trainer,
    whose data are not read. ``batch`` is a mapping (keyword arguments), a tuple (positional arguments) or
    the one argument: a tensor, a dataclass, an object with tensors; a ``training_step`` also takes a list.
    ``optimizer`` is an instance. A callable that builds one is not called on your model: AdamW is timed.
    ``autocast`` is the step's dtype, ``accumulate`` its number of micro-batches. ``trial`` times copies of
    the model for about ``budget_s`` seconds (None: 90) on ``device`` (None: the current CUDA device; without
    one nothing is timed; ``cpu`` works but says nothing about a GPU). ``layers`` examines a copy with this
    many blocks of every list of repeated blocks, for a model that is too large or too slow to time: the
    report is about the smaller model, and its name says so. Without it, the trial truncates deep models by
    itself and extrapolates. ``assume_gpu`` names the GPU whose costs are modelled; ``select`` and ``ignore``
    hold prefixes of codes. During a trial, a terminal or notebook shows progress unless ``progress`` is
    False.

    Raises `UserError`, a ValueError with a message of one sentence; of a wrong type it is a TypeError too.
    """
    began = time.monotonic()
    check_limits(budget_s, layers)
    is_name = assume_gpu is None or isinstance(assume_gpu, str)
    require(is_name, "assume_gpu", "the name of a GPU, such as 'H100'", assume_gpu)
    gpu = None if assume_gpu is None else gpu_spec(assume_gpu).name
    selected, ignored = codes("select", select), codes("ignore", ignore)
    step = {"loss": loss, "optimizer": optimizer, "training_step": training_step}
    job = _job(model, batch, **step, autocast=autocast, accumulate=accumulate)
    from fp8doctor.examine import examine
    from fp8doctor.trial import Budget, time_copies, without_forward

    if layers is not None:
        job = _cut(job, examine(job).network, layers)
    facts = msgspec.structs.replace(examine(job), assumed_gpu=gpu)
    if trial:
        propose = partial(hypotheses, select=selected, ignore=ignored)
        budget = Budget.since(began, budget_s or BUDGET_S)
        shown = progress_line() if progress and someone_watches() else nullcontext(lambda doing: None)
        with shown as tell:
            facts = time_copies(job, facts, device, propose, budget, lambda doing, _: tell(doing)) or facts
    if not recorded(facts, "trial"):
        facts = without_forward(facts)
    return Report.of(diagnose(facts, select=selected, ignore=ignored))


def check_limits(budget_s: Any, layers: Any = None) -> None:
    """Raise `UserError` for a budget or a number of blocks that is none."""
    if budget_s is not None and (not isinstance(budget_s, (int, float)) or not 0 < budget_s < float("inf")):
        raise UserError(f"budget_s has to be a positive number of seconds, not {budget_s!r}")
    if layers is not None and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 1):
        raise UserError(f"layers has to be a whole number of blocks, 1 or more, not {layers!r}")


def _job(
    model: Any, batch: Any, *, loss: Any, optimizer: Any, training_step: Any, autocast: Any, accumulate: Any
) -> Job:
    """Describe the training of a model. A Trainer supplies missing arguments."""
    parts = of_trainer(model) if is_trainer(type(model)) else {"model": model}
    root = _checked_model(parts.pop("model"))
    for name, value in (("loss", loss), ("training_step", training_step)):
        require(value is None or callable(value), name, "callable", value)
    is_one = optimizer is None or is_optimizer(optimizer) or callable(optimizer)
    require(is_one, "optimizer", "an optimizer, or a callable that builds one", optimizer)
    own_step = training_step is not None
    given = checked_batch(batch, "batch", own_step=own_step) if batch is not None else None
    if checked_accumulate(accumulate) != 1:
        parts["accumulate"] = accumulate
    if checked_autocast(autocast) is not None:
        parts["autocast"] = autocast
    if optimizer is not None:
        parts["optimizer"] = optimizer if is_optimizer(optimizer) else None
    target = Target(kind="live", name=type(core(root)).__name__, attribute=None)
    return job_of(root, target, given, loss=loss, training_step=training_step, **parts)


def _cut(job: Job, network: Network, layers: int) -> Job:
    """Cut the job's model to ``layers`` blocks per list, sharing its parameters, and say so in its name."""
    from fp8doctor.trial.copies.depth import cleaned
    from fp8doctor.trial.copies.replica import NotReplicable, replicate, unwrapped

    if not network.blocks:
        raise UserError(f"layers={layers}, and the model has no list of repeated blocks to cut")
    longer = {blocks.name: blocks.count for blocks in network.blocks if blocks.count > layers}
    if not longer:
        return job
    try:
        cuts = {name: layers for name, _ in unwrapped(job.model).named_modules() if cleaned(name) in longer}
        model = replicate(job.model, cuts=cuts, share=True)[0]
    except NotReplicable as error:
        raise UserError(f"layers={layers}: {error}") from None
    of = " + ".join(map(str, longer.values()))
    target = msgspec.structs.replace(job.target, name=f"{job.target.name} cut to {layers} of {of} blocks")
    return replace(job, model=model, target=target)


def _checked_model(model: Any) -> Any:
    import torch

    if not is_a(model, torch.nn.Module):
        what = type(model).__name__
        if inspect.isclass(model):
            what = f"the class {model.__name__}; build it first"
        elif isinstance(model, (str, Path)):
            what = f"a name; to examine a file, type: fp8doctor {model}"
        raise WrongType(f"model has to be a torch.nn.Module or a transformers Trainer, not {what}")
    if not any(True for _ in tensors_of(model, "_parameters")):
        raise UserError(f"the model ({type(model).__name__}) has no parameters to look at, so none to train")
    return model


def codes(argument: str, value: Any) -> tuple[str, ...]:
    """Split prefixes of codes: a string with commas, or a sequence of strings."""
    parts = [value] if isinstance(value, str) else value or ()
    are_text = isinstance(parts, Sequence) and all(isinstance(part, str) for part in parts)
    require(are_text, argument, "codes such as 'CMP,ENV001', or a sequence of them", value)
    return tuple(code for part in parts for each in part.split(",") if (code := each.strip().upper()))
