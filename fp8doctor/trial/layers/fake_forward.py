"""Watch a forward on fake tensors, for a job that is not timed; only the worker does this.

Fake tensors have sizes and no data, so a few blocks of any model run through in a moment, without a GPU. User
code may keep them (a mask that it caches), so no real step may follow in this process. FP8 layers run as the
Linears that they were, which have the same rows.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from fp8doctor.examine.autocasts import undecided
from fp8doctor.facts import Facts, recorded
from fp8doctor.loading.job import Job
from fp8doctor.stacks import te_private
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import Unknown, fake_tensor_mode, without_fake_tensors
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate, unwrapped
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.rows import Watched
from fp8doctor.trial.treatments.bf16 import to_bf16
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.wording import error_in_words

LARGEST_REAL = 2**28
"""Most bytes of the tensors that a function is tried with. A choice: no batch of a larger layer is called
refused."""

LONGEST_S = 10.0
"""Seconds that the forward may take. A choice: the decoders, encoders and mixtures that were tried take less
than one."""


class Outcome(msgspec.Struct):
    watched: Watched | None = None
    raised: str = ""
    """Its exception."""
    refused: str = ""
    """The exception that real tensors of these shapes and dtypes raise too."""


def with_forward(job: Job, facts: Facts, *, in_bf16: bool = False) -> Facts:
    """Add what a forward shows: rows, calls around the layers, or torch's refusal of a user's batch.

    Rows only of a model with FP8 layers, unless those ``in_bf16`` are wanted too. What was not seen has a
    reason.
    """
    if not recorded(facts, "network.linears"):
        return facts
    counts = in_bf16 or any(linear.use == "training" for linear in facts.linears())
    given = facts.get("workload.batch_source") == "given"
    if not (counts or given or undecided(facts)):
        return facts
    outcome = _outcome(job, facts, given=given, counts=counts)
    if outcome.watched is not None:
        facts = rows.with_watched(facts, outcome.watched.seen)
    else:
        facts = rows.unwatched(facts, outcome.raised)
    if counts and outcome.watched is None:
        gaps = {**facts.get("gaps", {}), "workload.rows": outcome.raised}
        facts = msgspec.structs.replace(facts, gaps=gaps)
    known = {"refused": outcome.refused} if outcome.refused else {}
    if counts and outcome.watched is not None:
        known["rows"] = outcome.watched.rows  # type: ignore[assignment]
    return msgspec.structs.replace(facts, workload=msgspec.structs.replace(facts.workload, **known))


def _outcome(job: Job, facts: Facts, *, given: bool, counts: bool) -> Outcome:
    """Run the forward, for a while."""
    if job.batch is None:
        return Outcome(raised=rows.NO_BATCH)
    try:
        with _at_most(LONGEST_S):
            outcome = forward(job, facts, given=given, counts=counts)
    except SystemExit:
        return Outcome(raised="a forward on fake tensors ends the process")
    except _TooLong:
        return Outcome(raised=f"a forward on fake tensors takes over {LONGEST_S:.0f} s")
    if outcome.raised:
        outcome.raised = f"a forward on fake tensors raises {outcome.raised}"
    return outcome


class _TooLong(BaseException):
    """No `Exception`, which user code may catch."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in Python code that runs longer, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def forward(job: Job, facts: Facts, *, given: bool, counts: bool) -> Outcome:
    """Run the forward here, with a ``given`` batch once more if it raises, for what real tensors raise."""
    job, outcome = rows.uncompiled(job), Outcome()
    try:
        outcome.watched = _on_fakes(job, facts, nullcontext())
    except Exception as error:
        outcome.raised = error_in_words(error)
    if given and (outcome.raised or not counts):
        casts = any(linear.use == "training" for linear in facts.linears())
        refusals = _Refusals(any_dtype=casts or facts.get("training.autocast_within") is not False)
        try:
            _on_fakes(job, facts, refusals)
        except Exception as error:
            outcome.refused = refusals.said if error is refusals.error else ""
    return outcome


def _on_fakes(job: Job, facts: Facts, around: AbstractContextManager[object]) -> Watched:
    plan, fp8 = rows.shallow(job, facts), list[bool]()
    mode, model, batch = _faked(job, plan)
    autocast = torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()
    with mode, torch.enable_grad(), autocasts_without_gpu(fp8), autocast, around:
        return rows.watch(job, facts, plan, model, batch, lambda: any(fp8[-1:]))


@contextmanager
def autocasts_without_gpu(fp8: list[bool]) -> Iterator[None]:
    """Open torch's autocasts on the CPU, and of Transformer Engine's keep the switches only."""
    make: Any = torch.autocast.__init__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache: Any = None) -> None:
        given = dtype or torch.get_autocast_dtype(device_type)
        make(self, "cpu", given if given is torch.float16 else torch.bfloat16, enabled, cache)

    def opened(cls: Any, /, enabled: bool = False, *settings: Any, **more: Any) -> None:
        fp8.append(enabled)

    def closed(cls: Any, /, *settings: Any, **more: Any) -> None:
        fp8.pop()

    manager, enters = te_private.state_manager(), te_private.own_names(te_private.ENTERS)
    if manager is not None and not enters:
        raise Unknown("Transformer Engine opens its autocast in another way")
    replaced: list[tuple[Any, str, Any]] = [
        (torch.autocast, "__init__", made),
        *((manager, name, classmethod(opened)) for name in enters),
        *((manager, name, classmethod(closed)) for name in te_private.own_names(te_private.EXITS)),
        *([(te_private.home(), te_private.RECIPE_TEST, _nothing)] if te_private.recipe_test() else []),
    ]
    before = [(of, name, vars(of)[name]) for of, name, _ in replaced]
    for of, name, instead in replaced:
        setattr(of, name, instead)
    try:
        yield
    finally:
        for of, name, own in before:
            setattr(of, name, own)


def _nothing(*arguments: Any, **settings: Any) -> None:
    """Replace functions that use a GPU."""


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


def _faked(job: Job, plan: depth.Plan) -> tuple[Any, nn.Module, Any]:
    """Make an uncompiled 16-bit copy of the model, cut as planned, and its batch, on fake tensors."""
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

    Their copies would be real, on another device than the fakes.
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
        return with_tensors(value, self._of)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            with self._mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                made = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]
