"""Follow the loss of paired steps with a real learning rate: FP8 as it is, BF16, and disturbed BF16.

Every run begins at the same weights, on a copy of its own, with the same batch and random numbers. FP8's
effect is compared with the effect of the last bit of BF16 weights: training is so sensitive that two orders
of one sum end at two losses. All runs are uncompiled, so only the precision differs. The smallest cut is
trained, which may be a part of the model.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn

from fp8doctor.facts import LossCurve, Trial, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.stacks import recognise
from fp8doctor.stacks.tensors import stored
from fp8doctor.trial.copies.compiling import give_own_code
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.copies.step import like, move, own_loss, training_step
from fp8doctor.trial.layers.optional_parts import NotMeasured, eager, fp8_layers, synthetic, with_part
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.state.undisturbed import free
from fp8doctor.trial.treatments.apply import modules
from fp8doctor.trial.treatments.bf16 import eager_bf16
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.trial.variant import Variant, as_it_is

LOSSES = "losses"
"""Name of this part in the facts, in progress and in ``skip``."""

STEPS, FEWEST_STEPS = 20, 5
"""Steps of every run, and the fewest that are reported. A choice for the time that they take."""

DISTURBED_RUNS = 2
"""Runs with other last bits: a single one may end close to the undisturbed one by chance."""

BF16_BITS = 8
"""Significant bits of BF16, the hidden one counted."""


def with_loss_curves(trial: Trial, bench: Bench, until: float, against: str | None = None) -> Trial:
    """Add the loss of paired steps to the trial; ``against`` is a reason not to begin."""

    def measured() -> tuple[LossCurve, ...]:
        if not any(arm.name == ArmName.AS_IS and arm.tried for arm in trial.arms):
            raise NotMeasured("the step as it is has no number")
        return loss_curves(bench, until, against)

    return with_part(trial, LOSSES, bench.device, measured)


def loss_curves(bench: Bench, until: float, against: str | None = None) -> tuple[LossCurve, ...]:
    """Follow the loss of every run on the smallest cut; empty for a model without FP8.

    Raises `NotMeasured`, or what the model raises.
    """
    base = bench.bases[0]
    names = fp8_layers(eager(base))
    if not names:
        return ()
    reason = against or why_not(bench, names)
    if reason is not None:
        raise NotMeasured(reason)
    bench.let_go()
    number, cut = bench.for_many_steps()
    names = fp8_layers(eager(bench.bases[number]))
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise NotMeasured("the budget was used up before it")
    run_until = time.monotonic() + left_s / (2 + DISTURBED_RUNS)  # a step in BF16 takes no longer
    fp8 = _followed(bench, number, as_it_is, STEPS, run_until)
    if len(fp8) < FEWEST_STEPS:
        raise NotMeasured("the budget would not have been enough for it")
    in_bf16 = functools.partial(_followed, bench, number, eager_bf16, len(fp8), until)
    runs = [(str(ArmName.AS_IS), fp8), (str(ArmName.BF16), in_bf16())]
    for seed in range(DISTURBED_RUNS):
        before = functools.partial(disturb, names=names, seed=seed)
        runs.append((str(ArmName.BF16_DISTURBED), in_bf16(before=before)))
    if any(len(losses) < len(fp8) for _, losses in runs):
        raise NotMeasured("the budget was used up before its end")
    blocks = {cleaned(name): count for name, count in cut.kept.items()}
    rates = tuple(dict.fromkeys(bench.rates[number]))
    return tuple(
        LossCurve(
            arm=arm,
            losses=tuple(each if math.isfinite(each) else None for each in losses),
            blocks=blocks,
            learning_rates=rates,
        )
        for arm, losses in runs
    )


def why_not(bench: Bench, names: Sequence[str]) -> str | None:
    """Return the reason why the loss would say nothing, or None."""
    if recorded(bench.job.workload, "loss_source") and bench.job.workload.loss_source == "mean":
        return (
            "the loss is synthetic, the mean of the output; give one, as loss(output, batch) in a model file"
        )
    if not any(bench.rates[0]):
        return "the optimizer's learning rate is 0"
    return synthetic(bench.job, bench.bases[0], names)


def _followed(
    bench: Bench,
    number: int,
    change: Callable[[Variant], Variant],
    steps: int,
    until: float,
    before: Callable[[nn.Module], object] = lambda model: None,
) -> list[float]:
    """Train a copy of the cut with this number, and return the loss of each step.

    ``before`` is applied to the copy first. The clock ``until`` may end it early.
    """
    model = strip_compile_marks(replicate(bench.bases[number])[0])
    give_own_code(model)
    before(model)
    job = replace(bench.job, loss=own_loss(bench.job.loss, bench.device))
    variant = change(Variant(model, move(bench.batch, bench.device), job.autocast, job.around))
    step = training_step(job, variant, _optimizer(bench, number, model, variant), bench.device)
    losses: list[float] = []
    try:
        with torch.compiler.set_stance("force_eager"):
            for taken in range(steps):
                if time.monotonic() > until:
                    break
                _seed(taken)
                with nullcontext() if taken else bench.guard.armed():
                    losses.append(float(step()))
                bench.guard.look()
    finally:
        del step, variant, model
        free(bench.device)
    return losses


def _seed(number: int) -> None:
    """Give a step the same random numbers in every run."""
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number)


def _optimizer(bench: Bench, number: int, model: nn.Module, variant: Variant) -> torch.optim.Optimizer:
    """Make the job's optimizer over the copy, with its own learning rates."""
    trained = {id(parameter) for parameter in variant.model.parameters() if parameter.requires_grad}
    of = model if trained <= set(map(id, model.parameters())) else variant.model
    counterparts = dict(zip(map(id, bench.bases[number].parameters()), of.parameters(), strict=True))
    optimizer = like(bench.optimizers[number], counterparts, {})
    for group, rate in zip(optimizer.param_groups, bench.rates[number], strict=True):
        group["lr"] = rate
    return optimizer


def disturb(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Move every weight of the named layers by one unit in the last place of BF16, up or down.

    Raises `NotMeasured` if a weight does not have 16 or 32 bits.
    """
    found = modules(model)
    for name in names:
        for weight in (each for layer in recognise(found[name], {}) for each in layer.weights):
            data = stored(weight).detach()
            if data.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise NotMeasured(f"{name} stores its weight in {data.dtype}, which has no last bit of BF16")
            generator = torch.Generator(data.device).manual_seed(seed)
            sign = torch.randint(0, 2, data.shape, generator=generator, device=data.device) * 2 - 1
            wide = data.float()
            unit = torch.ldexp(torch.ones_like(wide), torch.frexp(wide).exponent - BF16_BITS)
            data.copy_(torch.where(wide == 0, wide, wide + sign * unit))
