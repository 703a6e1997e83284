"""Compare each FP8 layer alone with its BF16 counterpart, given the same input.

One uncompiled step of the BF16 model runs over the weights of the deepest cut. When the gradient of a layer's
output arrives, the FP8 layer and its counterpart are called once more, alone, with that step's input and
gradient. They go one at a time, so it takes no more memory than the largest layer needs.

The reference is the BF16 result, which the user would have without FP8: BF16's own rounding is 50 dB below
the signal, FP8's 20 to 30. Shares of clipped and of flushed elements are counted if a layer's own code casts
to FP8. Casts inside library kernels (Transformer Engine, torchao's MX on a GPU) are not seen, and their
shares stay unknown.

Numbers from synthetic weights or data would say nothing about the user's training. A synthetic batch is known
to be one. Weights count as synthetic if they are not the user's: the model is on the meta device, or the
model file draws others for the cut. They also do if they look freshly initialized: no row or column of a
layer differs from the others by more than chance. Otherwise fp8doctor assumes that a given batch is data, and
that weights with structure are trained.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from fp8doctor.facts import LayerNumerics, Trial
from fp8doctor.loading.job import Job
from fp8doctor.stacks import NoCounterpart, recognise
from fp8doctor.stacks.casts import Casts, Difference
from fp8doctor.stacks.tensors import stored, tensors
from fp8doctor.stacks.transformer_engine import STACK as TRANSFORMER_ENGINE
from fp8doctor.stacks.transformer_engine import as_before
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.replica import NotReplicable, replicate, unwrapped
from fp8doctor.trial.copies.step import call, loss_of
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.trial.state.undisturbed import free
from fp8doctor.trial.treatments.apply import NotTried, modules
from fp8doctor.trial.treatments.bf16 import eager_bf16
from fp8doctor.trial.treatments.compilation import strip_compile_marks
from fp8doctor.trial.variant import Variant
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


NUMERICS = "numerics"
"""Name of this part in the facts, in progress and in ``skip``: a worker that died in it is followed by one
without it."""

MOST_LAYERS = 128
"""Layers that are measured; of more, a fixed sample. The cut of an 8B Llama has 84."""


def with_numerics(trial: Trial, bench: Bench, until: float, against: str | None = None) -> Trial:
    """Add the numerics of every FP8 layer to the trial; ``against`` is a reason not to begin."""
    return with_part(trial, NUMERICS, bench.device, lambda: layer_numerics(bench, until, against))


def layer_numerics(bench: Bench, until: float, against: str | None = None) -> tuple[LayerNumerics, ...]:
    """Measure the FP8 layers of the deepest cut one by one; empty if there are none.

    Raises `NotMeasured`, or what the model raises.
    """
    base = bench.bases[-1]
    fp8 = eager(base)
    names = fp8_layers(fp8)
    if not names:
        return ()
    reason = against or synthetic(bench.job, base, names)
    if reason is not None:
        raise NotMeasured(reason)
    as_is = bench.variant(fp8)
    bf16 = eager_bf16(bench.variant(eager(base)))
    chosen = names
    if len(names) > MOST_LAYERS:
        chosen = sorted(random.Random(0).sample(names, MOST_LAYERS), key=names.index)
    layers = [_Layer(name, modules(fp8)[name], modules(bf16.model)[name]) for name in chosen]
    alone = _Alone(_around(bench, as_is), _around(bench, bf16), until)
    try:
        with torch.compiler.set_stance("force_eager"), ExitStack() as hooks:
            if any(_is_te(each.fp8) for each in layers):
                _step(bench, as_is)  # fills the amax history, from which delayed scaling takes its scales
            for each in layers:
                hook = each.bf16.register_forward_hook(alone.watch(each), with_kwargs=True)
                hooks.callback(hook.remove)
            _step(bench, bf16)
    finally:
        for parameter in base.parameters():
            parameter.grad = None
        del as_is, bf16, layers
        free(bench.device)
    if not alone.found:
        late = (
            "the budget was used up before it"
            if time.monotonic() > until
            else "none of the FP8 layers runs in a step"
        )
        raise NotMeasured("; ".join(dict.fromkeys(alone.failures)) or late)
    return tuple(alone.found[name] for name in chosen if name in alone.found)


def worth_measuring(bench: Bench) -> bool:
    """Return whether the numerics would say something, so that time is kept for them."""
    base = bench.bases[-1]
    try:
        names = fp8_layers(eager(base))
        return bool(names) and synthetic(bench.job, base, names) is None
    except Exception:  # measuring them will raise it too, and report it
        _log.debug("looking for numerics to measure raises", exc_info=True)
        return False


def _is_te(module: nn.Module) -> bool:
    return any(layer.stack == TRANSFORMER_ENGINE for layer in recognise(module, {}))


def _around(bench: Bench, variant: Variant) -> Callable[[], AbstractContextManager[object]]:
    """Return the autocast of this variant's step."""
    device, dtype = bench.device.type, variant.autocast
    return (lambda: torch.autocast(device, dtype=dtype)) if dtype is not None else nullcontext


def _step(bench: Bench, variant: Variant) -> None:
    """Take one micro-batch forward and backward."""
    job, model, batch = bench.job, variant.model, variant.batch
    with _around(bench, variant)(), variant.around():
        own = own_step(job.training_step, as_compiled=False)
        output = None if own else call(model, batch)
        loss = own(model, batch) if own else loss_of(job, output, batch)
    loss.backward()


@dataclass(frozen=True)
class _Layer:
    """An FP8 layer and its BF16 counterpart over the same weights."""

    name: str
    fp8: nn.Module
    bf16: nn.Module


@dataclass(frozen=True)
class Called:
    """Arguments of a layer's call, and the gradient of its output if there is one."""

    arguments: tuple[Any, ...]
    settings: dict[str, Any]
    gradient: torch.Tensor | None


@dataclass
class _Alone:
    """Measures each layer when its output's gradient arrives, or at once if there will be none."""

    around_fp8: Callable[[], AbstractContextManager[object]]
    around_bf16: Callable[[], AbstractContextManager[object]]
    until: float
    found: dict[str, LayerNumerics] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    measured_with_gradient: set[str] = field(default_factory=set)

    def watch(self, layer: _Layer) -> Callable[..., None]:
        """Make the hook of a BF16 layer. A layer that is called several times is measured once."""

        def hook(
            module: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any], output: Any
        ) -> None:
            result = next(tensors(output), None)
            if result is None or layer.name in self.measured_with_gradient:
                return
            if result.requires_grad:
                result.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self._measure(layer, Called(arguments, settings, gradient))
                )
            elif torch.is_grad_enabled() and layer.name not in self.found:
                self._measure(layer, Called(arguments, settings, None))

        return hook

    def _measure(self, layer: _Layer, called: Called) -> None:
        """Measure one layer. If it fails, the others are measured."""
        if layer.name in self.measured_with_gradient or time.monotonic() > self.until:
            return
        if called.gradient is not None:
            self.measured_with_gradient.add(layer.name)
        try:
            self.found[layer.name] = self._compared(layer, called)
        except NoCounterpart as error:
            self.failures.append(str(error))
        except torch.OutOfMemoryError:
            self.failures.append("the GPU's memory is too small for it")
        except Exception as error:
            _log.debug("a layer alone raises", exc_info=True)
            self.failures.append(f"a layer alone raises {sentence(error)}")

    def _compared(self, layer: _Layer, called: Called) -> LayerNumerics:
        with self.around_bf16():
            reference = results(layer.bf16, layer.bf16.forward, called)
        casts = Casts()
        with self.around_fp8(), as_before(layer.fp8) if _is_te(layer.fp8) else nullcontext(), casts:
            result = results(layer.fp8, layer.fp8, called)
        saturated_pct, flushed_pct = casts.largest_pct()
        pairs = {name: Difference.of(reference[name], result[name]) for name in reference}
        return LayerNumerics(
            name=layer.name,
            output_sqnr_db=pairs["output"].sqnr_db,
            typical_output_sqnr_db=pairs["output"].typical_sqnr_db,
            input_gradient_sqnr_db=pairs["input"].sqnr_db if "input" in pairs else None,
            weight_gradient_sqnr_db=pairs["weight"].sqnr_db if "weight" in pairs else None,
            saturated_pct=saturated_pct,
            flushed_pct=flushed_pct,
            non_finite=sum(pair.non_finite for pair in pairs.values()),
        )


def results(module: nn.Module, forward: Callable[..., Any], called: Called) -> dict[str, torch.Tensor]:
    """Call a layer once; return ``output`` and, given a gradient, those of ``input`` and ``weight``."""
    with torch.enable_grad():
        arguments, settings = _detached(called.arguments), _detached(called.settings)
        output = next(tensors(forward(*arguments, **settings)))
        if called.gradient is None:
            return {"output": output.detach()}
        x = next(each for each in tensors((arguments, settings)) if each.is_floating_point())
        weights = [
            weight for layer in recognise(module, {}) for weight in layer.weights if weight.requires_grad
        ]
        if getattr(module, "fuse_wgrad_accumulation", False):
            weights = []  # TE adds to main_grad and returns a placeholder
        into, *gradients = torch.autograd.grad(
            output, [x, *weights], called.gradient.to(output.dtype), allow_unused=True
        )
    found = {"output": output.detach(), "input": into}
    if gradients:
        found["weight"] = (
            gradients[0] if len(gradients) == 1 else torch.cat([each.flatten() for each in gradients])
        )
    return {name: each for name, each in found.items() if each is not None}


def _detached(value: Any) -> Any:
    """Make a call's arguments leaves of a graph of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
