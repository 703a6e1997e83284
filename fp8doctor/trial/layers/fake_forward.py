"""Watch a forward on fake tensors, for a job that is not timed; only the worker does this.

User code may keep them (a mask that it caches), so no real step may follow in this process. FP8 layers run as
the Linears that they were, which have the same rows.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.facts import Facts, recorded
from fp8doctor.loading.job import Job
from fp8doctor.stacks import bf16_counterpart, recognise
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import fake_tensor_mode
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import replicate, unwrapped
from fp8doctor.trial.layers import rows
from fp8doctor.trial.layers.seen_calls import Seen, with_seen, without_forward
from fp8doctor.trial.measure.budget import Overrun, abort_after
from fp8doctor.trial.treatments.apply import swap
from fp8doctor.trial.treatments.forms import strip_compile_marks
from fp8doctor.wording import error_in_words

LONGEST_S = 20.0
"""Seconds that the forward may take. A choice: the decoders, encoders and mixtures that were tried take less
than one, FLUX up to four, and thrice that while other jobs run."""


FORWARD = "a forward on fake tensors"

MISFITS = (
    "must have same reduction dim",
    "shapes cannot be multiplied",
    "must have the same dtype",
    "scalar types: Long, Int",
    "should be the same",
)
"""In what torch says of shapes and dtypes that no matmul, embedding or convolution takes. Source: torch
2.13."""


class Misfit(Exception):
    """A layer that does not take what the user's batch brings it."""


def with_forward(job: Job, facts: Facts) -> Facts:
    """Add what a forward shows: rows, and calls around the layers. What was not seen has a reason."""
    if job.batch is None:
        return without_forward(facts, rows.NO_BATCH)
    if not recorded(facts, "network.linears"):
        return facts
    try:
        with abort_after(time.monotonic() + LONGEST_S, interrupts=True):
            seen = _cut_or_whole(job, facts)
    except SystemExit:
        why = f"{FORWARD} ends the process"
    except Overrun:
        why = f"{FORWARD} takes over {LONGEST_S:.0f} s"
    except Misfit as error:
        why = f"{FORWARD} raises: {error}"
        workload = msgspec.structs.replace(facts.workload, refused=str(error))
        facts = msgspec.structs.replace(facts, workload=workload)
    except Exception as error:
        why = f"{FORWARD} raises {error_in_words(error)}"
    else:
        return with_seen(facts, seen)
    return without_forward(facts, why)


def _cut_or_whole(job: Job, facts: Facts) -> Seen:
    """Watch a copy with few blocks; one with all if that raises, as where a forward pairs two lists."""
    plan = rows.shallow(job, facts)
    try:
        return _on_fakes(job, facts, plan)
    except Misfit:
        raise
    except Exception:
        if not plan.stacks:
            raise
        return _on_fakes(job, facts, depth.WHOLE)


def _on_fakes(job: Job, facts: Facts, plan: depth.Plan) -> Seen:
    """Watch a forward of an uncompiled 16-bit copy of the model on fake tensors."""
    mode = fake_tensor_mode(allow_non_fake_inputs=True)
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    """A real tensor, which keeps its ``id``, and the one fake in its place."""

    def fake_of(real: torch.Tensor) -> Any:
        if id(real) not in made:
            with mode:
                fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cpu")
                trained = nn.Parameter(fake, real.requires_grad) if isinstance(real, nn.Parameter) else None
            made[id(real)] = real, fake if trained is None else trained
        return made[id(real)][1]

    # Tensors of other devices, held as plain attributes, would stay real, on another device than the fakes.
    modules = list(unwrapped(job.model).modules())
    weights = {id(each) for of in modules for each in (*of.parameters(False), *of.buffers(False))}
    outside = (each for of in modules for each in tensors(vars(of)) if each.device.type != "cpu")
    stand_ins = {id(each): fake_of(each) for each in outside if id(each) not in weights}
    copied = replicate(job.model, cuts=plan.cuts[0], share=True, stand_ins=stand_ins)[0]
    model = swap(strip_compile_marks(copied), _in_16_bits).train()
    give_own_code(model)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: each if each is None else fake_of(each) for name, each in held.items()})
    batch = with_tensors(job.batch, fake_of)
    autocast = torch.autocast("cpu", dtype=job.autocast) if job.autocast else nullcontext()
    try:
        with mode, torch.enable_grad(), autocasts_on_the_cpu(), autocast:
            return rows.watch(job, facts, plan, model, batch)
    except RuntimeError as error:
        if not any(each in str(error) for each in MISFITS) or facts.workload.get("batch_source") != "given":
            raise
        raise Misfit(f"{_layer(model, error)}: {error}") from error


def _in_16_bits(name: str, module: nn.Module) -> nn.Module | None:
    """Return the Linear that an FP8 layer was; weights that are only stored are cast by their own forward."""
    stored = any(layer.use == "storage" for layer in recognise(module, {}))
    return None if stored else bf16_counterpart(module)


def _layer(model: nn.Module, error: BaseException) -> str:
    """Name the innermost module whose method raised."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    raised = [names[id(each)] for each in frames if id(each) in names]
    return (raised[-1] if raised else "") or type(model).__name__


@contextmanager
def autocasts_on_the_cpu() -> Iterator[None]:
    autocast: Any = torch.autocast
    own = autocast.__init__

    def made(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache: Any = None) -> None:
        given = dtype or torch.get_autocast_dtype(device_type)
        own(self, "cpu", given if given is torch.float16 else torch.bfloat16, enabled, cache)

    autocast.__init__ = made
    try:
        yield
    finally:
        autocast.__init__ = own
