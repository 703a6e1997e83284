"""Count the rows that each layer multiplies, which are not always the tokens of a micro-batch.

An encoder and a decoder see different ones, a pooled head one per sample. One forward without gradients
counts them, of an uncompiled copy of the shallowest cut (`fp8doctor.trial.copies.depth`). A block that was
cut away has the rows of the kept block that does the same work.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8doctor.facts import Facts
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.tensors import tensors
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import OriginalTouched, unwrapped
from fp8doctor.trial.copies.step import call, move
from fp8doctor.trial.layers.shapes import of_interest
from fp8doctor.trial.measure.layout import cut_of
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.undisturbed import Undisturbed, free, harm, of_the_users
from fp8doctor.trial.state.user_state import of_the_job
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

PART = "rows"
"""Name of this part in ``skip``: a worker that died in it is followed by one without it."""

NO_BATCH = "there is no batch to run the model on"

MOST_FORWARDS = 4
"""Forwards until every block was called. A choice: with a LayerDrop of 0.1, as in wav2vec 2.0, one block in
10,000 is never called; a tower that the batch does not enter costs three more forwards of a cut."""

PRODUCT = re.compile(r"mm|matmul|linear")
"""In the name of every function of torch that multiplies matrices."""

ATTENTION = inspect.signature(functional.multi_head_attention_forward)

Rows = dict[str, tuple[int, ...]]
"""As `fp8doctor.facts.Trial.rows`."""


def count_rows(
    job: Job,
    facts: Facts,
    device: torch.device,
    *,
    progress: Callable[[str, str | None], object],
    reason_against: str | None,
) -> tuple[Rows, str | None, list[str]]:
    """Count the rows in the user's process; return them, or the reason why not, and the user's changed items.

    Raises `DeviceLost`.
    """
    reason = reason_against or (NO_BATCH if job.batch is None else None)
    if reason is not None:
        return NOT_RECORDED, reason, []
    if not of_interest(facts):
        return {}, None, []
    wanted = [linear.name for linear in facts.network.linears]
    progress("counting the rows of its layers", PART)
    rows, reason, put_back, users = NOT_RECORDED, None, [], of_the_job(job)
    before = of_the_users(job, users)
    try:
        kept = Undisturbed(job, keep_workers=True)
        with kept, kept as put_back:
            rows = on_a_copy(job, [blocks.name for blocks in facts.network.blocks], wanted, device)
    except OriginalTouched as error:
        reason = str(error)
    except Exception as error:
        _log.debug("counting rows raises", exc_info=True)
        still_there(device, PART)
        reason = sentence(error)
    free(device)
    return rows, reason, [*put_back, *harm(before, of_the_users(job, users))]


def on_a_copy(job: Job, lists: Collection[str], wanted: Iterable[str], device: torch.device) -> Rows:
    """Count the rows of the ``wanted`` layers on an uncompiled copy. Raises the forward's exceptions."""
    job = replace(job, training_step=own_step(job.training_step, as_compiled=False))
    original = unwrapped(job.model)
    plan = depth.plans(original, depth.named_in(original, lists))[-1]
    model = strip_compile_marks(cut_of(job, plan.cuts[0], device)[1].train())
    give_own_code(model)
    batch = move(job.batch, device)
    layers, weights = found(original, plan, model, wanted)
    autocast = torch.autocast(device.type, dtype=job.autocast) if job.autocast else nullcontext()
    with Guard(job).armed(), torch.no_grad(), autocast:
        return counted(lambda: one_forward(job, model, batch), layers, weights, lists)


def one_forward(job: Job, model: nn.Module, batch: Any) -> object:
    """Run the user's training step if there is one, else call the model."""
    return job.training_step(model, batch) if job.training_step else call(model, batch)


def counted(
    forward: Callable[[], object],
    layers: Mapping[str, nn.Module],
    experts: Mapping[str, nn.Parameter],
    lists: Collection[str],
) -> Rows:
    """Count the rows of every call of the layers and of every expert, by their names.

    Raises the forward's exceptions. It runs the forward until every block of the ``lists`` was called: with
    LayerDrop each one skips others.
    """
    blocks = {block for name in (*layers, *experts) if (block := _block(name, lists))}
    rows: Rows = {}
    for _ in range(MOST_FORWARDS):
        with _calls(layers.values()) as calls, Products(layers.values(), experts.values()) as products:
            forward()
        found = {name: calls[module] or products.of_layer(module) for name, module in layers.items()}
        found |= {name: products.of_experts(weight) for name, weight in experts.items()}
        rows = {**{name: tuple(each) for name, each in found.items() if any(each)}, **rows}
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
    """Find the cut's modules for the ``wanted`` layers, and the 3-D weights of those that hold many experts.

    Both by their names in the whole model. A part of a fused module, such as ``mlp.fc1``, has its rows.
    """
    modules = {cleaned(name): module for name, module in model.named_modules()}
    kept_blocks = _kept_blocks(original, plan, modules)
    layers, weights = {}, {}
    for name in wanted:
        block = next((each for each in kept_blocks if name.startswith(each)), "")
        here = kept_blocks.get(block, "") + name.removeprefix(block)
        holder = modules.get(here.rpartition(".")[0])
        weight = None if holder is None else holder._parameters.get(here.rpartition(".")[2])
        if weight is not None and weight.dim() == 3:
            weights[name] = weight
        elif (module := modules.get(here) or holder) is not None:
            layers[name] = module
    return layers, weights


def _kept_blocks(original: nn.Module, plan: depth.Plan, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map the prefix of every block's names to that of the kept block that does the same work."""
    blocks = {}
    for stack in plan.stacks:
        name = cleaned(stack.name)
        kept = [key for key, _ in modules[name].named_children()]
        for position, (key, _) in enumerate(original.get_submodule(stack.name).named_children()):
            if position >= len(kept):
                position = stack.prefix + (position - stack.prefix) % stack.period
            blocks[f"{name}.{key}."] = f"{name}.{kept[position]}."
    return blocks


@contextmanager
def _calls(layers: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[int]]]:
    """Count the rows of the first tensor that each layer is called with, call by call."""
    rows: dict[nn.Module, list[int]] = {layer: [] for layer in layers}

    def count(layer: nn.Module, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        rows[layer].append(_rows(next(tensors((*arguments, *named.values())))))

    with ExitStack() as hooks:
        for layer in rows:
            hooks.callback(layer.register_forward_pre_hook(count, with_kwargs=True).remove)
        yield rows


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


class Products(TorchFunctionMode):
    """Notes the rows that are multiplied by weights of layers that are not called themselves.

    A layer's weight is seen in ``functional.linear``, and as the output projection of torch's attention. The
    experts of a 3-D weight are no modules: a loop multiplies by one slice after another, a grouped matmul by
    all at once given the ends of their rows, a batched one by all with the same rows. A tensor subclass with
    experts is not seen.
    """

    def __init__(self, layers: Iterable[nn.Module], experts: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._layers: dict[int, list[int]] = {id(layer._parameters.get("weight")): [] for layer in layers}
        plain = (weight for weight in experts if type(weight) is nn.Parameter)
        self._experts: dict[int, list[int]] = {weight.untyped_storage().data_ptr(): [] for weight in plain}

    def of_layer(self, layer: nn.Module) -> list[int]:
        """Return the rows of a layer's weight, product by product."""
        weight = layer._parameters.get("weight")
        return [] if weight is None else self._layers[id(weight)]

    def of_experts(self, weight: nn.Parameter) -> list[int]:
        """Return the rows of the experts in a weight, product by product."""
        if type(weight) is not nn.Parameter:
            return []
        return self._experts.get(weight.untyped_storage().data_ptr(), [])

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is functional.multi_head_attention_forward:
            bound = ATTENTION.bind(*args, **kwargs).arguments
            self._note_layer(bound["query"], bound["out_proj_weight"])
        elif PRODUCT.search(getattr(function, "__name__", "")):
            given = list(tensors((*args, *kwargs.values())))
            if function is functional.linear:
                self._note_layer(*given[:2])
            if self._experts:
                self._note_experts(given)
        return function(*args, **kwargs)

    def _note_layer(self, into: torch.Tensor, weight: torch.Tensor) -> None:
        if id(weight) in self._layers:
            self._layers[id(weight)].append(_rows(into))

    def _note_experts(self, given: list[torch.Tensor]) -> None:
        if len(given) < 2 or type(given[1]) not in (torch.Tensor, nn.Parameter):
            return
        into, weight, *ends = given
        seen = self._experts.get(weight.untyped_storage().data_ptr())
        if seen is None:
            return
        if weight.dim() == 2:
            seen.append(_rows(into))
        elif ends and not ends[0].is_floating_point():
            seen += ends[0].diff(prepend=ends[0].new_zeros(1)).tolist()
        elif into.dim() == 3:
            seen += [into.shape[1]] * into.shape[0]
