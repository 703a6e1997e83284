"""Run a forward on fake tensors: it counts layers' rows without a trial, and sees calls around layers.

Fake tensors have sizes and no data, so a cut of any model runs through in a moment, without a GPU. User code
may keep them: a mask that it caches would be fake in the next real step. So the forward runs in a forked
process, which cannot change anything of the user's, and is ended if it takes too long. FP8 layers run as the
Linears that they were, which have the same rows.

It takes some tenths of a second and is not part of examining: only a report of FP8 layers asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from fp8doctor.examine.autocasts import undecided
from fp8doctor.facts import Facts, recorded
from fp8doctor.forked import NothingSent, sent_by_a_fork
from fp8doctor.loading.job import Job
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import fake_tensor_mode, without_fake_tensors
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.replica import replicate, unwrapped
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.seen_calls import Seen, seen_calls, with_seen, without_seen
from fp8doctor.trial.treatments.bf16 import to_bf16
from fp8doctor.trial.treatments.compilation import strip_compile_marks

LARGEST_REAL = 2**28
"""Most bytes of the tensors that a function is tried with. A choice: no batch of a larger layer is called
refused."""

LONGEST_S = 10.0
"""Seconds that the forward may take. A choice: the decoders, encoders and mixtures that were tried take less
than one."""


def with_rows(job: Job, facts: Facts, *, in_bf16: bool = False) -> Facts:
    """Add the rows of every layer to the facts of a job that is not timed, or the reason why not.

    Only of a model with FP8 layers, unless rows ``in_bf16`` are wanted too.
    """
    if not in_bf16 and not any(linear.use == "training" for linear in facts.linears()):
        return facts
    lists = [blocks.name for blocks in facts.network.blocks]
    wanted = [linear.name for linear in facts.network.linears]
    try:
        counted = _of_a_fork(job, lambda: on_fakes(job, lists, wanted), dict[str, tuple[int, ...]])
    except _NotCounted as error:
        return msgspec.structs.replace(facts, gaps={**facts.get("gaps", {}), "workload.rows": str(error)})
    return msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, rows=counted))


def with_calls(job: Job, facts: Facts) -> Facts:
    """Add the checkpoint functions and autocasts that the step calls, or the reason why not.

    Only to the facts of a job whose code names one.
    """
    if not recorded(facts, "network.linears") or not undecided(facts):
        return facts
    wanted = [linear.name for linear in facts.network.linears]
    try:
        found = _of_a_fork(job, lambda: _calls(job, wanted), Seen | None)
        if found is None:
            raise _NotCounted("two forwards on fake tensors call different functions")
        if wanted and not found.regions:
            raise _NotCounted("a forward on fake tensors runs none of the layers")
    except _NotCounted as error:
        return without_seen(facts, str(error))
    return with_seen(facts, found)


def with_refusal(job: Job, facts: Facts) -> Facts:
    """Add the exception that torch raises for a user's batch, if its rows were not counted.

    Only one that real tensors of these shapes and dtypes raise too.
    """
    given = facts.get("workload.batch_source") == "given"
    if not given or recorded(facts, "workload.rows") or not recorded(facts, "network.linears"):
        return facts
    casts = any(linear.use == "training" for linear in facts.linears())
    casts = casts or facts.get("training.autocast_within") is not False
    lists = [blocks.name for blocks in facts.blocks()]
    try:
        refused = _of_a_fork(job, lambda: _refusal(job, lists, any_dtype=casts), str)
    except _NotCounted:
        return facts
    workload = msgspec.structs.replace(facts.workload, refused=refused)
    return msgspec.structs.replace(facts, workload=workload) if refused else facts


def _refusal(job: Job, lists: list[str], *, any_dtype: bool) -> str:
    plan = depth.plans(unwrapped(job.model), depth.named_in(unwrapped(job.model), lists))[-1]
    mode, model, batch = _faked(job, plan)
    refusals = _Refusals(any_dtype=any_dtype)
    try:
        with mode, torch.no_grad(), _autocast(job), refusals:
            rows.one_forward(job, model, batch)
    except Exception as error:
        return refusals.said if error is refusals.error else ""
    return ""


class _Refusals(TorchFunctionMode):
    """Raises what torch's public functions raise for real tensors of the same sizes, and notes the last.

    Other exceptions are of fake tensors, which have no data. With ``any_dtype`` dtypes alone are no reason:
    FP8 layers and autocasts cast their input.
    """

    def __init__(self, *, any_dtype: bool) -> None:
        super().__init__()
        self._any_dtype = any_dtype
        self.error: RuntimeError | None = None
        self.said = ""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, error, result = (args, kwargs or {}), None, None
        try:
            result = function(*args, **given[1])
        except RuntimeError as raised:
            error = raised
        mixed = function is functional.linear and len({each.dtype for each in tensors(given)}) > 1
        if mixed or type(error) is RuntimeError:  # fakes multiply mixed dtypes
            name = resolve_name(function) or "._"
            real = None if "._" in name else self._raised(function, given)
            if real is not None:
                self.error, self.said, error = real, f"{name}: {real}".splitlines()[0], real
        if error is not None:
            raise error
        return result

    def _raised(self, function: Any, given: Any) -> RuntimeError | None:
        """Return the exception for real tensors."""
        if sum(each.numel() * each.element_size() for each in tensors(given)) > LARGEST_REAL:
            return None
        with without_fake_tensors():
            args, kwargs = with_tensors(given, self._real)
            try:
                function(*args, **kwargs)
            except RuntimeError as error:
                return error if type(error) is RuntimeError else None
        return None

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if self._any_dtype and tensor.is_floating_point() else tensor.dtype
        return torch.zeros(tensor.shape, dtype=dtype)


class _NotCounted(Exception):
    """The reason why a forward gave no result, in a sentence."""


def _of_a_fork(job: Job, result: Callable[[], object], kind: Any) -> Any:
    """Compute a result of this kind in a forked process. Raises `_NotCounted`."""

    def work() -> bytes:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork
        return msgspec.json.encode(result())

    if job.batch is None:
        raise _NotCounted(rows.NO_BATCH)
    try:
        return msgspec.json.decode(sent_by_a_fork(work, LONGEST_S), type=kind)
    except OSError as error:
        why = f"no process can be started for a forward on fake tensors: {error.strerror}"
        raise _NotCounted(why) from error
    except NothingSent as nothing:
        early = f"ended early, or took over {LONGEST_S:.0f} s"
        why = f"raises {nothing.raised}" if nothing.raised is not None else early
        raise _NotCounted(f"a forward on fake tensors {why}") from nothing


def on_fakes(job: Job, lists: list[str], wanted: list[str]) -> rows.Rows:
    """Count the rows of every call of the ``wanted`` layers. Raises the forward's exceptions."""
    original = unwrapped(job.model)
    plan = depth.plans(original, depth.named_in(original, lists))[-1]
    mode, model, batch = _faked(job, plan)
    layers, _ = rows.found(original, plan, model, wanted)
    with mode, torch.no_grad(), _autocast(job):
        return rows.counted(lambda: rows.one_forward(job, model, batch), layers, {}, lists)


def _calls(job: Job, wanted: list[str]) -> Seen | None:
    """See a training forward's calls around the ``wanted`` layers. Raises the forward's exceptions."""
    job = replace(job, training_step=own_step(job.training_step, as_compiled=False))
    original = unwrapped(job.model)
    plan = depth.Plan((), (depth.Cut({}),))
    mode, model, batch = _faked(job, plan)
    layers, _ = rows.found(original, plan, model, wanted)
    with mode, torch.enable_grad(), _autocast(job):
        seen = seen_calls(lambda: rows.one_forward(job, model, batch), layers, model)
    return seen and msgspec.structs.replace(seen, without_hooks=_hooks(original) != _hooks(model))


def _autocast(job: Job) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()


def _hooks(model: nn.Module) -> int:
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules())


def _faked(job: Job, plan: depth.Plan) -> tuple[Any, nn.Module, Any]:
    """Make an uncompiled 16-bit copy of the model's first cut, and its batch, on fake tensors."""
    mode = fake_tensor_mode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    stand_ins = {id(each): fakes.of(each) for each in _not_copied(unwrapped(job.model))}
    copied = replicate(job.model, cuts=plan.cuts[0].indices, share=True, stand_ins=stand_ins)[0]
    model = to_bf16(strip_compile_marks(copied)).train()
    give_own_code(model)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: each if each is None else fakes.of(each) for name, each in held.items()})
    return mode, model, fakes.of(job.batch)


def _not_copied(model: nn.Module) -> list[torch.Tensor]:
    """List the tensors of other devices that modules hold as plain attributes.

    Their copies would be made on the GPU, which a forked process cannot use.
    """
    weights = {id(each) for each in chain(model.parameters(), model.buffers())}
    held = (each for module in model.modules() for each in tensors(module.__dict__))
    return [each for each in held if id(each) not in weights and each.device.type != "cpu"]


class _Fakes:
    """Fake CPU tensors in place of real ones, one for each."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Replace all tensors of a batch by fakes; containers keep their kind."""
        return with_tensors(value, self._of)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with self._mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                made = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]
