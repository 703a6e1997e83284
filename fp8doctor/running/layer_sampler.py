"""Measure the casts of the FP8 layers in one of the script's own steps.

Layers outside compiled code get a forward hook for that step alone: their input, weight and the gradient of
their output are measured when they come. A compiled layer gets none: only its weight is measured.
"""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8doctor.health.record import CastHealth, HealthLayer, Row, significant
from fp8doctor.running.patches import unnoticed
from fp8doctor.running.stepped_model import outside_compiled
from fp8doctor.stacks import Cast, casts_of, recognise
from fp8doctor.stacks.looking import class_name, modules_of, parameters_of
from fp8doctor.stacks.tensors import captured, local, subclass, tensors
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.wording import sentence

COMPILED = "compiled code, which a hook would compile again"
NO_SCALES = "fp8doctor does not read how this recipe scales"


class LayerSampler:
    """Finds the FP8 layers of a model, and measures them from `begin` to `end`; keeps no module alive."""

    def __init__(self, model: nn.Module, *, compiled_function: bool = False) -> None:
        """List the layers. With ``compiled_function``, unmarked layers may be compiled too."""
        self.layers: list[HealthLayer] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        compiled = {id(each) for region in outside_compiled(model)[1] for _, each in modules_of(region)}
        for name, module in modules_of(model):
            found = next((each for each in recognise(module, {}) if each.use == "training"), None)
            if found is None or found.engaged is False:
                continue
            recipe = found.recipe if isinstance(found.recipe, str) else None
            in_a_graph = compiled_function or id(module) in compiled
            unseen = NO_SCALES if not casts_of(module) else COMPILED if in_a_graph else None
            self.layers.append(
                HealthLayer(cleaned(name), class_name(type(module)), found.stack, recipe, unseen)
            )
            self._modules.append(weakref.ref(module))

    def begin(self) -> None:
        self._numbers: dict[tuple[int, str], Measured] = {}
        self.notes: dict[str, None] = {}
        self._expected: set[int] = set()
        """Layers whose gradient will come."""
        self._hooks = ExitStack()
        for at, (reference, layer) in enumerate(zip(self._modules, self.layers, strict=True)):
            if layer.unseen is None and (module := reference()) is not None:
                hook = partial(self._forward, at)
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                self._hooks.callback(handle.remove)

    def end(self) -> tuple[Row, ...]:
        """Stop watching, and read the numbers. Waits for the GPU."""
        self.release()
        for at, reference in enumerate(self._modules):
            if (module := reference()) is not None:
                self._weight(at, module)
        numbers, self._numbers = self._numbers, {}
        rows: dict[tuple[int, str], CastHealth] = {}
        for device in {each.numbers[0].device for each in numbers.values()}:
            of = {key: each for key, each in numbers.items() if each.numbers[0].device == device}
            read = torch.stack([number.reshape(()) for each in of.values() for number in each.numbers])
            values = read.reshape(len(of), -1).tolist()
            rows |= {key: in_words(each, *row) for (key, each), row in zip(of.items(), values, strict=True)}
        places = range(len(self.layers))
        return tuple(
            (rows.get((at, "input")), rows.get((at, "weight")), rows.get((at, "gradient"))) for at in places
        )

    def release(self) -> None:
        self._hooks.close()

    def _forward(self, at: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Measure input and weight now, and the gradient when it comes."""
        with self._guarded():
            given = next((each for each in tensors((args, kwargs)) if each.is_floating_point()), None)
            result = next(tensors(output), None)
            if given is None or result is None or captured(result):
                return
            casts = casts_of(module)
            self._measure(at, "input", given, casts.get("input"))
            self._weight(at, module)
            if result.requires_grad and at not in self._expected:  # no reentrant checkpoint's first pass
                self._expected.add(at)
                result.register_hook(partial(self._arrived, at, module))  # type: ignore[no-untyped-call]

    def _arrived(self, at: int, module: nn.Module, gradient: torch.Tensor) -> None:
        with self._guarded():
            self._measure(at, "gradient", gradient, casts_of(module).get("gradient"))

    def _weight(self, at: int, module: nn.Module) -> None:
        with self._guarded():
            weights = (each for each in parameters_of(module).values() if each is not None)
            weight = next((each for each in weights if each.ndim == 2), None)
            if weight is not None and local(weight) is weight and subclass(weight) is None:
                self._measure(at, "weight", weight, casts_of(module).get("weight"))

    def _measure(self, at: int, operand: str, tensor: torch.Tensor, cast: Cast | None) -> None:
        if cast is not None and (at, operand) not in self._numbers:
            with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
                self._numbers[at, operand] = measured(tensor, cast)

    def _guarded(self) -> AbstractContextManager[None]:
        return unnoticed(
            lambda error: self.notes.setdefault(f"a layer could not be sampled: {sentence(error)}")
        )


def in_words(cast: Measured, *numbers: float) -> CastHealth:
    signal, noise, typical, amax, scaled, history, clipped, before, after, finite = numbers
    return CastHealth(
        sqnr_db=_db(signal / noise if noise else 0.0),
        saturated_pct=significant(100 * clipped / max(1, cast.elements)),
        flushed_pct=significant(100 * max(0.0, before - after) / max(1.0, before)),
        amax=significant(amax),
        used=None if cast.most is None else significant(scaled / cast.most),
        of_history=significant(amax / history) if cast.remembers and history > 0 else None,
        non_finite=max(round(cast.elements - finite), int(not math.isfinite(amax))),
        typical_db=_db(typical),
    )


def _db(ratio: float) -> float | None:
    """Convert a ratio of norms to decibels; None for 0, infinity and NaN."""
    return round(20 * math.log10(ratio), 2) if 0 < ratio < math.inf else None


SAMPLED = 1 << 20
"""Elements of a tensor that a cast is judged by, in whole rows."""

TINY = 1e-12
"""Least magnitude that a scale is computed from, as in torchao (``EPS``)."""


@dataclass(frozen=True)
class Measured:
    """Numbers of a cast, on the device until someone reads them."""

    numbers: tuple[torch.Tensor, ...]
    """Norms of tensor and rounding error, the median ratio of a row's, the largest magnitude, that times the
    scale in use, the largest in the history; elements clipped, present before and after, and finite."""
    elements: int
    most: float | None
    """Largest number of the FP8 type, if a scale is in use."""
    remembers: bool
    """There is a history."""


def measured(tensor: torch.Tensor, cast: Cast) -> Measured:
    """Measure a cast of a tensor, without waiting for the GPU.

    The largest magnitude is the whole tensor's. All else is of at most `SAMPLED` elements, rows at even
    distances.
    """
    rows = tensor.detach()
    rows = rows.reshape(-1, rows.shape[-1]) if rows.ndim > 1 else rows.reshape(1, -1)
    amax = torch.linalg.vector_norm(rows, math.inf, dtype=torch.float32)
    part = rows[:: max(1, -(-rows.numel() // SAMPLED))].float()
    kind = getattr(torch, cast.dtype)
    most = torch.finfo(kind).max
    scale = cast.scale
    if scale is None:
        largest = amax if cast.rows == "tensor" else part.abs().amax(-1, keepdim=True)
        scale = most / largest.clamp(min=TINY)
        if cast.power_of_2:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = part * scale
    rounded = scaled.clamp(-most, most).to(kind).float()
    by_row = scale.reshape(-1)
    signal = torch.linalg.vector_norm(scaled, dim=-1) / by_row
    noise = torch.linalg.vector_norm(rounded - scaled, dim=-1) / by_row
    marks = (scaled.abs() > bound(kind), scaled != 0, rounded != 0, part.isfinite())
    numbers = (
        torch.linalg.vector_norm(signal),
        torch.linalg.vector_norm(noise),
        (signal / noise).nanmedian(),
        amax,
        amax if cast.scale is None else amax * cast.scale,
        amax if cast.history is None else cast.history.max(),
        *(each.sum(dtype=torch.float32) for each in marks),
    )
    used = most if cast.scale is not None else None
    return Measured(numbers, part.numel(), used, cast.history is not None)


def bound(kind: torch.dtype) -> float:
    """Return the magnitude that rounds beyond an FP8 type's largest."""
    information = torch.finfo(kind)
    return information.max + information.eps * 2.0 ** math.floor(math.log2(information.max)) / 2
