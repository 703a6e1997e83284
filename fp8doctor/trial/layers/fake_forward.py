"""Watch a forward on fake tensors, for a job that is not timed; only the worker does this.

Fake tensors have sizes and no data, so a few blocks of any model run through in a moment, without a GPU. User
code may keep them (a mask that it caches), so no real step may follow in this process. FP8 layers run as the
Linears that they were, which have the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.facts import Facts, recorded
from fp8doctor.loading.job import Job
from fp8doctor.stacks import te_private
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import Unknown, fake_tensor_mode
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate, unwrapped
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.rows import Watched
from fp8doctor.trial.layers.seen_calls import undecided
from fp8doctor.trial.measure.alarm import Overrun, abort_after
from fp8doctor.trial.treatments.bf16 import to_bf16
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.wording import error_in_words

LONGEST_S = 10.0
"""Seconds that the forward may take. A choice: the decoders, encoders and mixtures that were tried take less
than one."""


def with_forward(job: Job, facts: Facts, *, in_bf16: bool = False) -> Facts:
    """Add what a forward shows: rows, and calls around the layers.

    Rows only of a model with FP8 layers, unless those ``in_bf16`` are wanted too. What was not seen has a
    reason.
    """
    if not recorded(facts, "network.linears"):
        return facts
    counts = in_bf16 or any(linear.use == "training" for linear in facts.linears())
    if not (counts or undecided(facts)):
        return facts
    watched = _watched(job, facts)
    if isinstance(watched, str):
        facts = rows.unwatched(facts, watched)
        gaps = {**facts.get("gaps", {}), "workload.rows": watched}
        return msgspec.structs.replace(facts, gaps=gaps) if counts else facts
    facts = rows.with_watched(facts, watched.seen)
    workload = msgspec.structs.replace(facts.workload, rows=watched.rows)
    return msgspec.structs.replace(facts, workload=workload) if counts else facts


def _watched(job: Job, facts: Facts) -> Watched | str:
    """Run the forward for a while, or say why nothing was seen."""
    if job.batch is None:
        return rows.NO_BATCH
    why = "a forward on fake tensors"
    try:
        with abort_after(time.monotonic() + LONGEST_S, interrupts=True):
            return _on_fakes(rows.uncompiled(job), facts)
    except SystemExit:
        return f"{why} ends the process"
    except Overrun:
        return f"{why} takes over {LONGEST_S:.0f} s"
    except Exception as error:
        return f"{why} raises {error_in_words(error)}"


def _on_fakes(job: Job, facts: Facts) -> Watched:
    plan, fp8 = rows.shallow(job, facts), list[bool]()
    mode, model, batch = _faked(job, plan)
    autocast = torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()
    with mode, torch.enable_grad(), autocasts_without_gpu(fp8), autocast:
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


def _faked(job: Job, plan: depth.Plan) -> tuple[Any, nn.Module, Any]:
    """Make an uncompiled 16-bit copy of the model, cut as planned, and its batch, on fake tensors."""
    mode = fake_tensor_mode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    stand_ins = {id(each): fakes.of(each) for each in _not_copied(unwrapped(job.model))}
    copied = replicate(job.model, cuts=plan.cuts[0].kept, share=True, stand_ins=stand_ins)[0]
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
