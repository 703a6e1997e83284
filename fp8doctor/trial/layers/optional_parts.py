"""Parts of a trial after the times (numerics): run them, and refuse synthetic weights or data.

Numbers from synthetic weights or data would say nothing about the user's training. A synthetic batch is known
to be one. Weights count as synthetic if they are not the user's: the model is on the meta device, or the
model file draws others for the cut. They also do if they look freshly initialized: no row or column of a
layer differs from the others by more than chance. Otherwise fp8doctor assumes that a given batch is data, and
that weights with structure are trained.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import nn

from fp8doctor.facts import Trial
from fp8doctor.loading.job import Job
from fp8doctor.stacks import recognise
from fp8doctor.stacks.tensors import stored
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.replica import NotReplicable, replicate, unwrapped
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.trial.treatments.apply import NotTried, modules
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

CORNER = 1024
"""Rows and columns of a weight that are looked at."""

UNEVEN = 2.0
"""Ratio from which on weights have structure: variance of rows' (or columns') power / its value by chance.

Medians over the layers of small models, measured: 1.04 to 1.08 as torch and transformers initialize (uniform,
normal, truncated), 0 for orthogonal ones; a Llama of 0.9 M parameters after 100, 200 and 400 steps: 2.4, 3.5,
4.4.
"""


class NotMeasured(Exception):
    """The reason why a part has no result."""


def with_part(trial: Trial, part: str, device: torch.device, measure: Callable[[], object]) -> Trial:
    """Add the result of ``measure`` to the trial as the fact ``part``, or the reason why there is none.

    Raises only `DeviceLost`, if it crashed the GPU's context.
    """
    try:
        return msgspec.structs.replace(trial, **{part: measure()})
    except (NotMeasured, NotTried, NotReplicable) as error:
        reason = str(error)
    except torch.OutOfMemoryError:
        reason = "the GPU's memory is too small for it"
    except Exception as error:
        _log.debug("measuring the %s raises", part, exc_info=True)
        reason = f"it raises {sentence(error)}"
    still_there(device, part)
    return msgspec.structs.replace(trial, gaps={**trial.get("gaps", {}), f"trial.{part}": reason})


def fp8_layers(model: nn.Module) -> list[str]:
    """Name the layers that train in FP8."""
    return [
        name
        for name, module in modules(model).items()
        if any(layer.use == "training" for layer in recognise(module, {}))
    ]


def eager(base: nn.Module) -> nn.Module:
    """Make a replica of the base without compile marks that shares its weights."""
    model = strip_compile_marks(replicate(base, share=True)[0])
    give_own_code(model)
    return model


def synthetic(job: Job, model: nn.Module, names: Sequence[str]) -> str | None:
    """Return the reason why numerics of the named layers would say nothing, or None."""
    if job.workload.batch_source == "made up":
        return "the batch is synthetic; give a real one, as example_batch() in a model file"
    if any(parameter.is_meta for parameter in job.model.parameters()):
        return (
            "the weights are synthetic: the whole model was too large to be built, or was built on the "
            "meta device"
        )
    ours, theirs = modules(model), modules(unwrapped(job.model))
    pairs = [(_corners(ours[name]), _corners(theirs[name])) for name in names if name in theirs]
    if any(not _alike(one, other) for mine, users in pairs for one, other in zip(mine, users, strict=False)):
        return (
            "the weights are synthetic: the model file builds what is timed with other weights than its "
            "model; load a checkpoint in it"
        )
    uneven = [unevenness(weight) for name in names for weight in _corners(ours[name])]
    if not uneven or statistics.median(uneven) < UNEVEN:
        return (
            "the weights are as an initializer draws them, which says nothing about trained ones; load "
            "a checkpoint"
        )
    return None


def _corners(module: nn.Module) -> list[torch.Tensor]:
    """Cut a corner out of every weight of a layer."""
    found = [stored(weight).detach() for layer in recognise(module, {}) for weight in layer.weights]
    return [(each if each.ndim == 2 else each[0])[:CORNER, :CORNER].float() for each in found]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two weights are the same, but for a few updates at the trial's learning rate."""
    return one.shape == other.shape and torch.allclose(
        one, other.to(one.device), rtol=1e-2, atol=1e-2 * float(one.abs().max())
    )


def unevenness(weight: torch.Tensor) -> float:
    """Compare how much the power of rows, or of columns, varies with its value by chance.

    The mean of n squares of independent draws varies by (kurtosis - 1) / n of its own square.
    """
    squares = weight.double().square()
    mean = squares.mean()
    spread = squares.square().mean() / mean.square() - 1
    if not bool(spread > 0) or min(weight.shape) < 2:
        return 0.0
    return max(
        float(squares.mean(dim).var() / mean.square() / (spread / squares.shape[dim])) for dim in (0, 1)
    )
