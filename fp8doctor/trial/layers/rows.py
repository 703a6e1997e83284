"""Watch a forward of a copy: the rows that each layer multiplies, and what it runs in.

Rows are not always the tokens of a micro-batch. The copy has a few of the repeated blocks; one that was cut
away has the rows and regions of the kept block in its place of the pattern.
"""

import inspect
import logging
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fp8doctor.cost import micro_batches
from fp8doctor.facts import NOT_RECORDED, Facts
from fp8doctor.loading.job import Job
from fp8doctor.stacks import code_names
from fp8doctor.stacks.looking import class_name, modules_of, read_class
from fp8doctor.stacks.tensors import has_data, is_float8, tensors
from fp8doctor.stacks.torch_private import FAKE_TENSOR, storage_of
from fp8doctor.stacks.transformer_engine import named, recipe_of
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import OriginalTouched, cut_of, unwrapped
from fp8doctor.trial.copies.step import call, carried_loss, move
from fp8doctor.trial.layers.seen_calls import (
    FIRST_MICROBATCH,
    CallsSeen,
    Seen,
    autocast_now,
    rows_of,
    with_seen,
    without_forward,
)
from fp8doctor.trial.measure.budget import TrialRun, still_there
from fp8doctor.trial.measure.evidence import on_calls
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.settings import buffers_apart, free
from fp8doctor.trial.treatments.apply import modules
from fp8doctor.trial.treatments.forms import strip_compile_marks
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

PART = "rows"
"""Name of this part in ``skip``: a worker that died in it is followed by one without it."""

NO_BATCH = "there is no batch to run the model on"

BLOCKS = 4
"""Blocks of each list that the copy keeps: regions may differ from block to block in a pattern."""

MOST_FORWARDS = 4
"""Forwards until every layer was called. A choice: with a LayerDrop of 0.1, as in wav2vec 2.0, one block in
10,000 is never called; a tower that the batch does not enter costs three more forwards of a cut."""

PRODUCT = re.compile(r"mm|matmul|linear|att(entio)?n")
"""In the name of every function that multiplies FP8 tensors, such as an attention."""

OF_LAYERS = (functional.linear, functional.multi_head_attention_forward)
"""Functions that multiply their first tensor by the weights of layers that are not called."""

Rows = dict[str, tuple[int, ...]]
"""As `fp8doctor.facts.Workload.rows`."""


def watch_copy(job: Job, facts: Facts, run: TrialRun) -> Facts:
    """Run a forward of a copy, and add what it shows, or why nothing was seen. Raises `DeviceLost`."""
    reason = run.skip.get(PART) or (NO_BATCH if job.batch is None else None)
    if reason is None:
        run.teller.say("counting the rows of its layers", PART)
        try:
            facts = with_seen(facts, on_a_copy(job, facts, run.device, run.guard or Guard(job)))
        except OriginalTouched as error:
            reason = str(error)
        except Exception as error:
            _log.debug("watching a forward raises", exc_info=True)
            still_there(run.device, PART)
            reason = sentence(error)
        free(run.device)
    return facts if reason is None else without_forward(facts, reason)


def on_a_copy(job: Job, facts: Facts, device: torch.device, guard: Guard) -> Seen:
    """Watch a forward of an uncompiled copy. Raises the forward's exceptions."""
    plan = shallow(job, facts)
    model = strip_compile_marks(cut_of(job, plan.cuts[0], device)[1].train())
    give_own_code(model)
    batch = move(job.batch, device)
    autocast = torch.autocast(device.type, dtype=job.autocast) if job.autocast else nullcontext()
    with guard.armed(), buffers_apart(), torch.enable_grad(), autocast:
        return watch(job, facts, plan, model, batch)


def shallow(job: Job, facts: Facts) -> depth.Plan:
    """Plan a copy with `BLOCKS` of each list."""
    original = unwrapped(job.model)
    lists = depth.named_in(original, [each.name for each in facts.network.blocks])
    return depth.first_blocks(original, lists, BLOCKS)


def watch(job: Job, facts: Facts, plan: depth.Plan, model: nn.Module, batch: Any) -> Seen:
    """Watch training forwards of a copy until every layer was called: with LayerDrop each skips others.

    A second one shows the next micro-batch. Raises the forward's exceptions.
    """
    original, training_step = unwrapped(job.model), own_step(job.training_step, as_compiled=False)
    kept_blocks = _kept_blocks(original, plan, model)
    layers, experts = found(model, [linear.name for linear in facts.network.linears], kept_blocks)
    calls, rows = CallsSeen(), Rows()
    products = Products(layers, experts, calls)
    hooks = [sum(len(each._forward_pre_hooks) for each in of.modules()) for of in (original, model)]
    if original is job.model and hooks[0] == hooks[1]:  # neither a wrapper nor a hook casts its inputs
        plain = {linear.name for linear in facts.network.linears if linear.use == "none"}
        products.fixed = {
            id(each._parameters.get("weight")) for name, each in layers.items() if name in plain
        }
    for number in range(MOST_FORWARDS):
        with on_calls(model.modules(), calls.enter, calls.leave), products:
            output = training_step(model, batch) if training_step else call(model, batch)
        rows = products.rows() | calls.rows(layers) | rows
        next_is_told = number == 0 and calls.first_microbatch and micro_batches(facts) > 1
        if rows.keys() >= {*layers, *experts} and not next_is_told:
            break
    seen = calls.seen(layers, model, kept_blocks=kept_blocks)
    if _may_pass_it(job, facts):
        seen.first_microbatch = NOT_RECORDED
    names = {id(module): cleaned(name) for name, module in modules_of(model)}
    adapted = {each.name: each.layer for each in facts.network.linears if each.adapter == "adapter"}
    scaled = {name: products.scaled[id(each)] for name, each in layers.items() if id(each) in products.scaled}
    ran = {name: recipe_of(each) for name, each in layers.items()}
    return msgspec.structs.replace(
        seen,
        rows=_of_their_layers(adapted, rows),
        scaled=scaled,
        recipes={name: named(recipe) for name, recipe in ran.items() if recipe is not None},
        own_loss=not (job.training_step or job.loss) and carried_loss(output) is not None,
        regions=_of_their_layers(adapted, seen.regions),
        autocast=products.in_own_autocast,
        fp8_calls=(*products.in_fp8,),
        fp32_products=tuple(names.get(each or 0, "") for each, _ in products.in_fp32.most_common()),
        without_hooks=hooks[0] != hooks[1],
    )


def _may_pass_it(job: Job, facts: Facts) -> bool:
    """Return whether `FIRST_MICROBATCH` may be passed unseen: in a subclass, or by the user's own call."""
    original = unwrapped(job.model)
    kinds = {cleaned(name): class_name(type(module)) for name, module in modules_of(original)}
    takes = not job.training_step and FIRST_MICROBATCH in inspect.signature(original.forward).parameters
    return takes or any(kinds.get(each.name, each.kind) != each.kind for each in facts.network.fp8)


def _of_their_layers(adapted: Mapping[str, str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Add adapters that are not held in the blocks, and not cut away with them (kohya's)."""
    return {name: found[layer] for name, layer in adapted.items() if layer in found} | dict(found)


def found(
    model: nn.Module, wanted: Iterable[str], kept_blocks: Mapping[str, str]
) -> tuple[dict[str, nn.Module], dict[str, nn.Parameter]]:
    """Find a cut's modules for the ``wanted`` layers, and the 3-D weights of those that hold many experts.

    Both by their names in the whole model. A part of a fused module, such as ``mlp.fc1``, has its rows.
    """
    named = modules(model)
    layers, weights = {}, {}
    for name in wanted:
        block = next((each for each in kept_blocks if name.startswith(each)), "")
        here = kept_blocks.get(block, "") + name.removeprefix(block)
        holder = named.get(here.rpartition(".")[0])
        weight = None if holder is None else holder._parameters.get(here.rpartition(".")[2])
        if weight is not None and weight.dim() == 3:
            weights[name] = weight
        elif (module := named.get(here) or holder) is not None:
            layers[name] = module
    return layers, weights


def _kept_blocks(original: nn.Module, plan: depth.Plan, model: nn.Module) -> dict[str, str]:
    named, blocks = modules(model), {}
    for stack in plan.stacks:
        name = cleaned(stack.name)
        kept = [key for key, _ in named[name].named_children()]
        for position, (key, _) in enumerate(original.get_submodule(stack.name).named_children()):
            if position >= len(kept):
                position = stack.prefix + (position - stack.prefix) % (len(kept) - stack.prefix)
            blocks[f"{name}.{key}.".lstrip(".")] = f"{name}.{kept[position]}.".lstrip(".")
    return blocks


class Products(TorchFunctionMode):
    """Notes products in FP8 or under an autocast that the forward opens, and rows of layers not called.

    The experts of a 3-D weight are no modules: a loop multiplies by one slice after another, a grouped matmul
    by all at once given the ends of their rows, a batched one by all with the same rows. Fake ends have no
    numbers: then one entry holds the rows of all. A tensor subclass with experts is not seen.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], experts: Mapping[str, nn.Parameter], calls: CallsSeen
    ) -> None:
        super().__init__()
        self._calls = calls
        self.scaled: dict[int | None, bool | None] = {}
        """By the id of the module that called ``torch._scaled_mm``: as in `Seen.scaled`."""
        self._outside, self.in_own_autocast = autocast_now(), False
        self.in_fp8: dict[str, None] = {}
        """Names of the functions that multiplied FP8 tensors."""
        self.in_fp32 = Counter[int | None]()
        """Module that multiplies fp32 tensors, by id -> the tensors' elements."""
        self.fixed: set[int] = set()
        """Ids of weights whose fake product raises for another dtype, as a real one does."""
        weights = ((name, layer._parameters.get("weight")) for name, layer in layers.items())
        self._keys = {name: ("weight", id(weight)) for name, weight in weights if weight is not None}
        plain = ((name, weight) for name, weight in experts.items() if is_plain(weight))
        self._keys |= {name: ("experts", storage_of(weight)) for name, weight in plain}
        self._rows: dict[tuple[str, int], list[int]] = {key: [] for key in self._keys.values()}

    def rows(self) -> Rows:
        return {name: tuple(rows) for name, key in self._keys.items() if (rows := self._rows[key])}

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        output = function(*args, **kwargs)
        if (found := PRODUCT.search(name)) is not None:
            given = list(tensors((*args, *kwargs.values())))
            if any(map(is_float8, (*given, *tensors(output)))):  # an operator of the user's own may cast
                self.in_fp8[name] = None
            if function is functional.linear and id(given[1]) in self.fixed and not has_data(given[0]):
                _refuse_other_dtype(*given[:2])
            if function in OF_LAYERS:
                for weight in given[1:]:
                    if (seen := self._rows.get(("weight", id(weight)))) is not None:
                        seen.append(rows_of(given[0]))
            if not found[0].startswith("att"):
                self.in_own_autocast |= autocast_now() not in (None, self._outside)
                if function is torch._scaled_mm:
                    self.scaled[self._calls.running] = None if torch.is_grad_enabled() else _backward_in_fp8()
                if autocast_now() is None and {each.dtype for each in given[:2]} == {torch.float32}:
                    self.in_fp32[self._calls.running] += sum(each.numel() for each in given[:2])
                self._note_experts(given)
        return output

    def _note_experts(self, given: list[torch.Tensor]) -> None:
        if len(given) < 2 or not is_plain(given[1]):
            return
        into, weight, *ends = given
        seen = self._rows.get(("experts", storage_of(weight)))
        if seen is None:
            return
        if weight.dim() == 2 or (ends and not has_data(ends[0])):
            seen.append(rows_of(into))
        elif ends and not ends[0].is_floating_point():
            seen += ends[0].diff(prepend=ends[0].new_zeros(1)).tolist()
        elif into.dim() == 3:
            seen += [into.shape[1]] * into.shape[0]


def _backward_in_fp8() -> bool:
    """Tell if the backward of the autograd function that runs uses torch's FP8 matmul, by its code."""
    held = (each for frame, _ in traceback.walk_stack(None) for each in frame.f_locals.values())
    kind = next(filter(None, (read_class(type(each), "_forward_cls") for each in held)), None)
    return kind is not None and any(name == "_scaled_mm" for name, _ in code_names.named(kind.backward))


def _refuse_other_dtype(into: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise what a real product would: one of fake tensors takes any dtypes. Autocast casts floats only."""
    casts = autocast_now() is not None
    same = into.dtype == weight.dtype or (casts and into.is_floating_point() and weight.is_floating_point())
    if not same and is_plain(into) and is_plain(weight):
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {into.dtype} and {weight.dtype}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell if a tensor is torch's own, also a fake one: other subclasses hold their data elsewhere."""
    return type(tensor) in (torch.Tensor, nn.Parameter) or class_name(type(tensor)) == FAKE_TENSOR
