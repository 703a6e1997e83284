"""Whether weights and data are made up, so that their numbers would say nothing about the user's training.

A made-up batch is known to be one. Weights count as made up when they are not the user's: the model is on the
meta device, or the model file draws others for the cut. They also do when they are as an initialiser draws
them: no row or column of a layer differs from the others by more than chance. What cannot be known is
assumed: a batch that was given is data, and weights that have structure are trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import nn

from fp8doctor.loading.job import Job
from fp8doctor.stacks import recognise
from fp8doctor.stacks.tensors import stored
from fp8doctor.trial.copies.replica import unwrapped
from fp8doctor.trial.treatments.apply import modules

CORNER = 1024
"""Rows and columns of a weight that are looked at."""

UNEVEN = 2.0
"""Variance of the power of rows (or columns) / its value by chance, from which on weights have structure.

Medians over the layers of small models, measured: 1.04 to 1.08 as torch and transformers initialise (uniform,
normal, truncated), 0 for orthogonal ones; a Llama of 0.9 M parameters after 100, 200 and 400 steps: 2.4, 3.5,
4.4.
"""


def made_up(job: Job, model: nn.Module, names: Sequence[str]) -> str | None:
    """Tell why numerics of the named layers of ``model`` would say nothing; None where nothing speaks against
    them."""
    if job.workload.batch_source == "made up":
        return "the batch is made up; give a real one, as example_batch() in a model file"
    if any(parameter.is_meta for parameter in job.model.parameters()):
        return (
            "the weights are made up: the whole model was too large to be built, or was built on the "
            "meta device"
        )
    ours, theirs = modules(model), modules(unwrapped(job.model))
    pairs = [(_weights(ours[name]), _weights(theirs[name])) for name in names if name in theirs]
    if any(not _alike(one, other) for mine, users in pairs for one, other in zip(mine, users, strict=False)):
        return (
            "the weights are made up: the model file builds what is timed with other weights than its "
            "model; load a checkpoint in it"
        )
    uneven = [unevenness(weight) for name in names for weight in _weights(ours[name])]
    if not uneven or statistics.median(uneven) < UNEVEN:
        return (
            "the weights are as an initialiser draws them, which says nothing about trained ones; load "
            "a checkpoint"
        )
    return None


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Cut a corner out of every weight of a layer."""
    found = [stored(weight).detach() for layer in recognise(module, {}) for weight in layer.weights]
    return [(each if each.ndim == 2 else each[0])[:CORNER, :CORNER].float() for each in found]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two weights are the same, but for a few updates at the trial's learning rate."""
    return one.shape == other.shape and torch.allclose(
        one, other.to(one.device), rtol=1e-2, atol=1e-2 * float(one.abs().max())
    )


def unevenness(weight: torch.Tensor) -> float:
    """Compare how the power of rows, or of columns, varies with what chance gives it.

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
