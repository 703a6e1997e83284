"""The rows that each layer multiplies, which are not always the tokens of a micro-batch.

An encoder and a decoder see different ones, a pooled head one for each sample. One forward without gradients
counts them, of an eager copy of the shallowest cut (`fp8doctor.trial.copies.depth`). A block that was cut
away has the rows of the kept block that does the same work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from fp8doctor.facts import Facts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.held_tensors import tensors
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import OriginalTouched, unwrapped
from fp8doctor.trial.copies.step import call, move
from fp8doctor.trial.layers.expert_rows import ExpertRows
from fp8doctor.trial.layers.read_rows import ReadRows
from fp8doctor.trial.layers.shapes import of_interest
from fp8doctor.trial.measure.layout import cut_of
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.trial.state.digest import harm, of_the_users
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.undisturbed import Undisturbed, free
from fp8doctor.trial.treatments import strip_compile_marks
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

ARM = "rows"
"""This part's name in ``skip``, which a new worker leaves out when the one before died of it."""

NO_BATCH = "there is no batch to run the model on"

MOST_FORWARDS = 4
"""Forwards until every block was called. A choice: with a LayerDrop of 0.1, that of wav2vec 2.0, one block in
10,000 is never called; a tower that the batch does not enter costs three more forwards of a cut."""

Rows = dict[str, tuple[int, ...]]
"""As `fp8doctor.facts.Trial.rows`."""


def seen_beside(
    job: Job,
    facts: Facts,
    device: torch.device,
    *,
    progress: Callable[[str, str | None], object],
    reason_against: str | None,
) -> tuple[Rows, str | None, list[str]]:
    """Count the rows in the user's process, or tell why they are not known; name what of the user's changed.
    Raises `DeviceLost`."""
    reason = reason_against or (NO_BATCH if job.batch is None else None)
    if reason is not None:
        return NOT_RECORDED, reason, []
    if not of_interest(facts):
        return {}, None, []
    wanted = [linear.name for linear in facts.network.linears]
    progress("counting the rows of its layers", ARM)
    rows, reason, before, put_back = NOT_RECORDED, None, of_the_users(job), []
    try:
        kept = Undisturbed(job, keep_workers=True)
        with kept, kept as put_back:
            rows = seen(job, [blocks.name for blocks in facts.network.blocks], wanted, device)
    except OriginalTouched as error:
        reason = str(error)
    except Exception as error:
        _log.debug("counting rows raises", exc_info=True)
        still_there(device, ARM)
        reason = sentence(error)
    free(device)
    return rows, reason, [*put_back, *harm(before, of_the_users(job))]


def seen(job: Job, lists: Collection[str], wanted: Iterable[str], device: torch.device) -> Rows:
    """Count the rows of every call of the ``wanted`` layers, by their names in the whole model.

    Raises whatever the forward does.
    """
    job = replace(job, training_step=own_step(job.training_step, as_compiled=False))
    original = unwrapped(job.model)
    plan = depth.plans(original, depth.named_in(original, lists))[-1]
    model = strip_compile_marks(cut_of(job, plan.cuts[0], device)[1].train())
    give_own_code(model)
    batch = move(job.batch, device)
    layers, weights = found(original, plan, model, wanted)
    autocast = torch.autocast(device.type, dtype=job.autocast) if job.autocast else nullcontext()

    def forward() -> Rows:
        experts = ExpertRows(weights.values())
        with counted(layers.values()) as rows, experts, ReadRows(layers.values()) as read:
            job.training_step(model, batch) if job.training_step else call(model, batch)
        of_all = {name: tuple(rows[module] or read.of(module)) for name, module in layers.items()}
        of_all |= {name: tuple(experts.of(weight)) for name, weight in weights.items()}
        return {name: each for name, each in of_all.items() if any(each)}

    with Guard(job).armed(), torch.no_grad(), autocast:
        return with_every_block(forward, [*layers, *weights], lists)


def with_every_block(forward: Callable[[], Rows], wanted: Collection[str], lists: Collection[str]) -> Rows:
    """Count forward by forward until every block of the ``lists`` was called: LayerDrop leaves out others in
    each."""
    blocks = {block for name in wanted if (block := _block(name, lists))}
    rows: Rows = {}
    for _ in range(MOST_FORWARDS):
        rows = {**forward(), **rows}
        if blocks <= {_block(name, lists) for name in rows}:
            break
    return rows


def _block(name: str, lists: Iterable[str]) -> str | None:
    """Name the block that a layer is in; None outside of all."""
    for each in lists:
        within = f"{each}." if each else ""
        if name.startswith(within):
            return within + name.removeprefix(within).partition(".")[0]
    return None


def found(
    original: nn.Module, plan: depth.Plan, model: nn.Module, wanted: Iterable[str]
) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """Find the modules of a cut that stand for the ``wanted`` layers, and the 3-D weights of those that hold
    many experts, by their names in the whole model.

    A part of a fused module, such as ``mlp.fc1``, has the rows of the module.
    """
    modules = {cleaned(name): module for name, module in model.named_modules()}
    twins = _twins(original, plan, modules)
    layers, weights = {}, {}
    for name in wanted:
        twin = _twin(name, twins)
        holder = modules.get(twin.rpartition(".")[0])
        weight = None if holder is None else holder._parameters.get(twin.rpartition(".")[2])
        if weight is not None and weight.dim() == 3:
            weights[name] = weight
        elif (module := modules.get(twin) or holder) is not None:
            layers[name] = module
    return layers, weights


def _twins(original: nn.Module, plan: depth.Plan, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map what the name of every block begins with to that of the kept block that stands for it."""
    twins = {}
    for stack in plan.stacks:
        name = cleaned(stack.name)
        kept = [key for key, _ in modules[name].named_children()]
        for position, (key, _) in enumerate(original.get_submodule(stack.name).named_children()):
            standing_in = (
                position if position < len(kept) else stack.prefix + (position - stack.prefix) % stack.period
            )
            twins[f"{name}.{key}."] = f"{name}.{kept[standing_in]}."
    return twins


def _twin(name: str, twins: Mapping[str, str]) -> str:
    found = next((block for block in twins if name.startswith(block)), None)
    return name if found is None else twins[found] + name.removeprefix(found)


@contextmanager
def counted(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[int]]]:
    """Count the rows of the first tensor that each layer is called with, call by call."""
    rows: dict[nn.Module, list[int]] = {layer: [] for layer in layers}

    def count(layer: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        into = next(tensors((*arguments, *named.values())))
        rows[layer].append(into.numel() // into.shape[-1])

    handles = [layer.register_forward_pre_hook(count, with_kwargs=True) for layer in rows]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
