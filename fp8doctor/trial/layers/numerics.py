"""What FP8 does to each layer alone, held to its BF16 twin with the same input.

One eager step of the BF16 model runs over the weights of the deepest cut. When the gradient of a layer's
output arrives, the FP8 layer and its twin are called once more, alone, with the input and the gradient of
that step. They go one at a time, so that no more memory is taken than the largest layer needs.

The reference is the BF16 result itself, which the user would have without FP8: BF16's own rounding is 50 dB
below the signal, FP8's 20 to 30. Shares of clipped and of vanished elements are taken where a layer's own
code casts to FP8. Casts inside kernels of a library (Transformer Engine, torchao's MX on a GPU) are not seen,
and their shares stay unknown.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp8doctor.facts import LayerNumerics, Trial
from fp8doctor.stacks import NoTwin, recognise
from fp8doctor.stacks.held_tensors import tensors
from fp8doctor.stacks.transformer_engine import STACK as TRANSFORMER_ENGINE
from fp8doctor.stacks.transformer_engine import as_before
from fp8doctor.trial.copies.compiling import give_own_code, own_step
from fp8doctor.trial.copies.replica import replicate
from fp8doctor.trial.copies.step import call, loss_of
from fp8doctor.trial.layers.made_up import made_up
from fp8doctor.trial.layers.part import NotMeasured, with_part
from fp8doctor.trial.layers.precision_lost import Casts, Difference
from fp8doctor.trial.measure.bench import Bench
from fp8doctor.trial.state.undisturbed import free
from fp8doctor.trial.treatments import strip_compile_marks
from fp8doctor.trial.treatments.apply import modules
from fp8doctor.trial.treatments.bf16 import eager_bf16
from fp8doctor.trial.variant import Variant
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

NUMERICS = "numerics"
"""This part's name in the facts, in progress and in ``skip``, as if it were an arm. A process that dies of it
is followed by one without."""

MOST_LAYERS = 128
"""Layers that are measured; of more a sample is drawn, the same each time. The cut of an 8B Llama has 84."""


def with_numerics(trial: Trial, bench: Bench, until: float, against: str | None = None) -> Trial:
    """Add the numerics of every FP8 layer to the trial; ``against`` is a reason not to begin."""
    return with_part(trial, NUMERICS, bench.device, lambda: layer_numerics(bench, until, against))


def layer_numerics(bench: Bench, until: float, against: str | None = None) -> tuple[LayerNumerics, ...]:
    """Measure the FP8 layers of the deepest cut one by one; empty when there are none.

    Raises `NotMeasured`, or what the model raises.
    """
    base = bench.bases[-1]
    fp8 = eager(base)
    names = fp8_layers(fp8)
    if not names:
        return ()
    reason = against or made_up(bench.job, base, names)
    if reason is not None:
        raise NotMeasured(reason)
    as_is = bench.variant(fp8)
    twin = eager_bf16(bench.variant(eager(base)))
    chosen = (
        names
        if len(names) <= MOST_LAYERS
        else sorted(random.Random(0).sample(names, MOST_LAYERS), key=names.index)
    )
    layers = [_Layer(name, modules(fp8)[name], modules(twin.model)[name]) for name in chosen]
    alone = _Alone(_around(bench, as_is), _around(bench, twin), until)
    handles = []
    try:
        with torch.compiler.set_stance("force_eager"):
            if any(layer.stack == TRANSFORMER_ENGINE for each in layers for layer in recognise(each.fp8, {})):
                _step(bench, as_is)  # fills the history of amax, from which delayed scaling takes its scales
            handles = [
                each.twin.register_forward_hook(alone.watch(each), with_kwargs=True) for each in layers
            ]
            _step(bench, twin)
    finally:
        for handle in handles:
            handle.remove()
        for parameter in base.parameters():
            parameter.grad = None
        del as_is, twin, layers
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
    """Whether the numerics would say something, so that time is kept for them."""
    base = bench.bases[-1]
    try:
        names = fp8_layers(eager(base))
        return bool(names) and made_up(bench.job, base, names) is None
    except Exception:  # which measuring them will meet too, and say
        _log.debug("looking for numerics to measure raises", exc_info=True)
        return False


def fp8_layers(model: nn.Module) -> list[str]:
    """Name the layers that train in FP8."""
    return [
        name
        for name, module in modules(model).items()
        if any(layer.use == "training" for layer in recognise(module, {}))
    ]


def eager(base: nn.Module) -> nn.Module:
    """Make a replica of the base without compile marks, over its very weights."""
    model = strip_compile_marks(replicate(base, share=True)[0])
    give_own_code(model)
    return model


def _around(bench: Bench, variant: Variant) -> Callable[[], AbstractContextManager[object]]:
    """Return the autocast that the step of this variant runs under."""
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
    """An FP8 layer and its twin, with one set of weights."""

    name: str
    fp8: nn.Module
    twin: nn.Module


@dataclass
class _Alone:
    """Measures each layer as the gradient of its output arrives, or at once where none will."""

    around_fp8: Callable[[], AbstractContextManager[object]]
    around_twin: Callable[[], AbstractContextManager[object]]
    until: float
    found: dict[str, LayerNumerics] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    measured_with_gradient: set[str] = field(default_factory=set)

    def watch(self, layer: _Layer) -> Callable[..., None]:
        """Hook the twin. A layer that is called several times in a step is measured once."""

        def hook(
            module: nn.Module, arguments: tuple[Any, ...], settings: dict[str, Any], output: Any
        ) -> None:
            result = next(tensors(output), None)
            if result is None or layer.name in self.measured_with_gradient:
                return
            if result.requires_grad:
                result.register_hook(lambda gradient: self._measure(layer, arguments, settings, gradient))  # type: ignore[no-untyped-call]
            elif torch.is_grad_enabled() and layer.name not in self.found:
                self._measure(layer, arguments, settings, None)

        return hook

    def _measure(
        self,
        layer: _Layer,
        arguments: tuple[Any, ...],
        settings: dict[str, Any],
        gradient: torch.Tensor | None,
    ) -> None:
        """Measure one layer. What is wrong with it costs that layer alone."""
        if layer.name in self.measured_with_gradient or time.monotonic() > self.until:
            return
        if gradient is not None:
            self.measured_with_gradient.add(layer.name)
        try:
            self.found[layer.name] = self._compared(layer, arguments, settings, gradient)
        except NoTwin as error:
            self.failures.append(str(error))
        except torch.OutOfMemoryError:
            self.failures.append("the GPU's memory is too small for it")
        except Exception as error:
            _log.debug("a layer alone raises", exc_info=True)
            self.failures.append(f"a layer alone raises {sentence(error)}")

    def _compared(
        self,
        layer: _Layer,
        arguments: tuple[Any, ...],
        settings: dict[str, Any],
        gradient: torch.Tensor | None,
    ) -> LayerNumerics:
        is_te = any(each.stack == TRANSFORMER_ENGINE for each in recognise(layer.fp8, {}))
        with self.around_twin():
            reference = _called(layer.twin, layer.twin.forward, arguments, settings, gradient)
        casts = Casts()
        with self.around_fp8(), as_before(layer.fp8) if is_te else nullcontext(), casts:
            result = _called(layer.fp8, layer.fp8, arguments, settings, gradient)
        pairs = {name: Difference.of(reference[name], result[name]) for name in reference}
        saturated, flushed = casts.shares()
        return LayerNumerics(
            name=layer.name,
            output_sqnr_db=pairs["output"].sqnr_db,
            typical_output_sqnr_db=pairs["output"].typical_sqnr_db,
            input_gradient_sqnr_db=pairs["input"].sqnr_db if "input" in pairs else None,
            weight_gradient_sqnr_db=pairs["weight"].sqnr_db if "weight" in pairs else None,
            saturated_pct=saturated,
            flushed_pct=flushed,
            non_finite=sum(pair.non_finite for pair in pairs.values()),
        )


def _called(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    settings: dict[str, Any],
    gradient: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Call a layer once; return ``output`` and, with a gradient, the gradients of ``input`` and
    ``weight``."""
    with torch.enable_grad():
        arguments, settings = _detached(arguments), _detached(settings)
        output = next(tensors(forward(*arguments, **settings)))
        if gradient is None:
            return {"output": output.detach()}
        x = next(each for each in tensors((arguments, settings)) if each.is_floating_point())
        weights = [
            weight for layer in recognise(module, {}) for weight in layer.weights if weight.requires_grad
        ]
        fused = getattr(
            module, "fuse_wgrad_accumulation", False
        )  # TE then adds to main_grad and returns a placeholder
        wanted = [x] if fused else [x, *weights]
        gradients = torch.autograd.grad(output, wanted, gradient.to(output.dtype), allow_unused=True)
    found = {"output": output.detach(), "input": gradients[0]}
    if gradients[1:]:
        found["weight"] = (
            gradients[1] if len(gradients) == 2 else torch.cat([each.flatten() for each in gradients[1:]])
        )
    return {name: each for name, each in found.items() if each is not None}


def _detached(value: Any) -> Any:
    """Make the arguments of a call leaves of a graph of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value
