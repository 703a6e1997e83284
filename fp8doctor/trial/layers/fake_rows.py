"""The rows that each layer multiplies, where nothing is timed: a forward on fake tensors counts them.

Fake tensors have sizes and no data, so that a cut of any model runs through in a moment, without a GPU. What
they touch may keep them: a mask that a user's function caches would be fake in the next real step. So the
forward runs in a process that is forked for it. It cannot change anything of the user's, and is ended when it
takes too long. FP8 layers run as the Linears that they were, whose rows are the same.

It takes some tenths of a second, and is no part of examining: only a report of FP8 layers asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.examine.autocasts import undecided
from fp8doctor.facts import Facts, recorded
from fp8doctor.forked import NothingTold, told_by_a_fork
from fp8doctor.loading.job import Job
from fp8doctor.stacks.held_tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import fake_tensor_mode
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.replica import replicate, unwrapped
from fp8doctor.trial.copies.step import call
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.read_rows import ReadRows
from fp8doctor.trial.layers.seen_calls import Seen, seen_calls, with_seen, without_seen
from fp8doctor.trial.treatments import strip_compile_marks, to_bf16

LONGEST_S = 10.0
"""Seconds that the forward may take. A choice: the decoders, encoders and mixtures that were tried take less
than one."""


def with_rows(job: Job, facts: Facts) -> Facts:
    """Add the rows of every layer to the facts of a job that is not timed, or the reason why they are not
    known."""
    if not any(linear.use == "training" for linear in facts.linears()):
        return facts
    gaps = facts.gaps if recorded(facts, "gaps") else {}
    lists = [blocks.name for blocks in facts.network.blocks]
    wanted = [linear.name for linear in facts.network.linears]
    try:
        counted = _of_a_fork(job, lambda: seen(job, lists, wanted), dict[str, tuple[int, ...]])
    except _NotCounted as error:
        return msgspec.structs.replace(facts, gaps={**gaps, "workload.rows": str(error)})
    return msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, rows=counted))


def with_calls(job: Job, facts: Facts) -> Facts:
    """Add which checkpoint functions and autocasts the step calls, or why that is not known, to the facts of
    a job whose code names one."""
    if not recorded(facts, "network.linears") or not undecided(facts):
        return facts
    wanted = [linear.name for linear in facts.network.linears]
    try:
        found = _of_a_fork(job, lambda: calls(job, wanted), Seen | None)
        if found is None:
            raise _NotCounted("two forwards on fake tensors call different functions")
        if wanted and not found.regions:
            raise _NotCounted("a forward on fake tensors runs none of the layers")
    except _NotCounted as error:
        return without_seen(facts, str(error))
    return with_seen(facts, found)


class _NotCounted(Exception):
    """Why a forward told nothing, in a sentence."""


def _of_a_fork(job: Job, told: Callable[[], object], kind: Any) -> Any:
    """Have a forked process tell something of this kind. Raises `_NotCounted`."""

    def work() -> bytes:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        return msgspec.json.encode(told())

    if job.batch is None:
        raise _NotCounted(rows.NO_BATCH)
    try:
        return msgspec.json.decode(told_by_a_fork(work, LONGEST_S), type=kind)
    except OSError as error:
        why = f"no process can be started for a forward on fake tensors: {error.strerror}"
        raise _NotCounted(why) from error
    except NothingTold as nothing:
        early = f"ended early, or took over {LONGEST_S:.0f} s"
        why = f"raises {nothing.raised}" if nothing.raised is not None else early
        raise _NotCounted(f"a forward on fake tensors {why}") from nothing


def seen(job: Job, lists: list[str], wanted: list[str]) -> rows.Rows:
    """Count the rows of every call of the ``wanted`` layers, in this process. Raises whatever the forward
    does."""
    original = unwrapped(job.model)
    plan = depth.plans(original, depth.named_in(original, lists))[-1]
    mode, model, batch = _faked(job, plan)
    layers, _ = rows.found(original, plan, model, wanted)
    autocast = torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()

    def forward() -> rows.Rows:
        with rows.counted(layers.values()) as calls, ReadRows(layers.values()) as read:
            job.training_step(model, batch) if job.training_step else call(model, batch)
        of_all = {name: tuple(calls[module] or read.of(module)) for name, module in layers.items()}
        return {name: each for name, each in of_all.items() if any(each)}

    with mode, torch.no_grad(), autocast:
        return rows.with_every_block(forward, layers, lists)


def calls(job: Job, wanted: list[str]) -> Seen | None:
    """Tell what a training forward calls around the ``wanted`` layers, in this process. Raises whatever the
    forward does."""
    job = replace(job, training_step=own_step(job.training_step, as_compiled=False))
    original = unwrapped(job.model)
    plan = depth.Plan((), (depth.Cut({}),))
    mode, model, batch = _faked(job, plan)
    layers, _ = rows.found(original, plan, model, wanted)
    autocast = torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()

    def forward() -> object:
        return job.training_step(model, batch) if job.training_step else call(model, batch)

    with mode, torch.enable_grad(), autocast:
        seen = seen_calls(forward, layers, model)
    return seen and msgspec.structs.replace(seen, without_hooks=_hooks(original) != _hooks(model))


def _hooks(model: nn.Module) -> int:
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


def _faked(job: Job, plan: depth.Plan) -> tuple[Any, nn.Module, Any]:
    """Make an uncompiled 16-bit copy of the first cut of a model, and its batch, on fake tensors."""
    mode = fake_tensor_mode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    stand_ins = {id(each): fakes.of(each) for each in _not_copied(unwrapped(job.model))}
    copied = replicate(job.model, cuts=plan.cuts[0].indices, share=True, stand_ins=stand_ins)[0]
    model = to_bf16(strip_compile_marks(copied)).train()
    give_own_code(model)
    for module in model.modules():
        fakes.take_over(module)
    return mode, model, fakes.of(job.batch)


def _not_copied(model: nn.Module) -> list[torch.Tensor]:
    """List the tensors of other devices that modules hold as plain attributes.

    A copy of one would be made on its GPU, which a forked process cannot use.
    """
    weights = {id(each) for each in chain(model.parameters(), model.buffers())}
    held = (each for module in model.modules() for each in tensors(module.__dict__))
    return [each for each in held if id(each) not in weights and each.device.type != "cpu"]


class _Fakes:
    """Fake tensors of the CPU in the place of real ones, one for each."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take_over(self, module: nn.Module) -> None:
        """Put fakes in the place of a module's own parameters and buffers."""
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                held[name] = tensor if tensor is None else self._of(tensor)  # type: ignore[assignment]

    def of(self, value: Any) -> Any:
        """Put fakes in the place of all tensors of a batch; containers keep their kind."""
        return with_tensors(value, self._of)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with self._mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                made = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]
