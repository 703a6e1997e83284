"""Measure the casts of the FP8 layers in one of the script's own steps.

Layers outside compiled code get a forward hook for that step alone: their input, weight and the gradient of
their output are measured when they come. A compiled region keeps its code and gets no hook. When the gradient
of its output arrives, it runs once more, not compiled, on the first samples of the batch, with copies of its
buffers and the random state put back, and the layers are measured there.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8doctor.health.record import CastHealth, HealthLayer, Row, significant
from fp8doctor.running.calls import Calls
from fp8doctor.running.patches import unnoticed
from fp8doctor.running.stepped_model import outside_compiled
from fp8doctor.stacks import Cast, casts_of, recognise, torch_private
from fp8doctor.stacks.looking import (
    class_name,
    lineage,
    modules_of,
    parameters_of,
    state_of,
    tensors_of,
)
from fp8doctor.stacks.tensors import captured, local, subclass, tensors, with_tensors
from fp8doctor.stacks.torch_private import behind_compile
from fp8doctor.stacks.transformer_engine import STACK as TRANSFORMER_ENGINE
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.state.settings import open_autocast
from fp8doctor.trial.state.users import contents, restore
from fp8doctor.wording import sentence

OF_ALL = "num_items_in_batch"
"""Argument of transformers' models (4.46 on): the tokens of all micro-batches, by which they divide the
loss."""

ROWS = 16
"""Multiple that torch's FP8 matmul wants of each side."""

IN_A_COMPILED_FUNCTION = "a compiled function calls it, and a hook would compile that again"
SHARDED = "its compiled block is distributed, and running it again would need the other processes"
TE_COMPILED = "it is compiled, and running it again would change Transformer Engine's scales"
NO_SCALES = "fp8doctor does not read how this recipe scales"

Module = weakref.ref[nn.Module]


class LayerSampler:
    """Finds the FP8 layers of a model, and measures them from `begin` to `end`; keeps no module alive."""

    def __init__(self, model: nn.Module, *, compiled_function: bool = False) -> None:
        """List the layers. With ``compiled_function``, unmarked layers may be compiled too."""
        self.layers: list[HealthLayer] = []
        self._modules: list[tuple[Module, Module | None]] = []
        """Of each layer, and the compiled region around it."""
        regions = {
            id(below): weakref.ref(region)
            for region in outside_compiled(model)[1]
            for _, below in modules_of(region)
        }
        for name, module in modules_of(model):
            region = regions.get(id(module))
            found = next((each for each in recognise(module, {}) if each.use == "training"), None)
            if found is None or found.engaged is False:
                continue
            unseen = IN_A_COMPILED_FUNCTION if compiled_function and region is None else None
            recipe = found.recipe if isinstance(found.recipe, str) else None
            unseen = unseen or _why_unseen(module, found.stack, region)
            self.layers.append(
                HealthLayer(cleaned(name), class_name(type(module)), found.stack, recipe, unseen)
            )
            self._modules.append((weakref.ref(module), region))

    def begin(self) -> None:
        self._numbers: dict[tuple[int, str], Measured] = {}
        self.notes: dict[str, None] = {}
        self._expected: set[int] = set()
        """Layers whose gradient will come, and ids of regions that run again."""
        self._hooks = ExitStack()
        regions: dict[Module, None] = {}
        for at, ((module, region), layer) in enumerate(zip(self._modules, self.layers, strict=True)):
            if layer.unseen is None and region is None:
                _hook(self._hooks, module(), partial(self._forward, at))
            elif layer.unseen is None and region is not None:
                regions[region] = None
        calls = Calls((alive for each in regions if (alive := each()) is not None), self._called)
        calls.begin()
        self._hooks.callback(calls.end)

    def end(self) -> tuple[Row, ...]:
        """Stop watching, and read the numbers. Waits for the GPU."""
        self.release()
        for at, (reference, _) in enumerate(self._modules):
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

    # Layers outside compiled code

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

    # Compiled regions

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a region again when the gradient of its output arrives; its first call alone."""
        if id(module) in self._expected or not torch.is_grad_enabled():
            return None
        given = list(tensors((args, kwargs)))
        versions = [each._version for each in given]
        around, autocast = open_autocast(), torch_autocast(given)

        def returned(output: Any) -> None:
            result = next((each for each in tensors(output) if each.requires_grad), None)
            if result is not None and id(module) not in self._expected and not captured(result):
                self._expected.add(id(module))
                result.register_hook(arrived)  # type: ignore[no-untyped-call]

        def arrived(gradient: torch.Tensor) -> None:
            with self._guarded():
                if [each._version for each in given] == versions:
                    with autocast(), around():
                        self._run_again(module, args, kwargs, gradient)

        return returned

    def _run_again(self, module: nn.Module, args: Any, kwargs: Any, gradient: torch.Tensor) -> None:
        """Run a region on a few samples, not compiled, and measure its layers."""
        size, count = _few(next((each for each in tensors((args, kwargs)) if each.ndim), gradient))
        first = partial(with_tensors, of=lambda each: _first(each, size, count))
        if gradient.ndim:
            gradient = _first(gradient, size, count)
        elif kwargs.get(OF_ALL) is None:
            gradient = gradient * count / size  # the mean over the samples
        outputs: list[torch.Tensor] = []

        def note(at: int, layer: nn.Module, given: Any, named: Any, output: Any) -> None:
            self._forward(at, layer, given, named, output)
            outputs.extend(each for each in tensors(output) if each.requires_grad)

        with rerun(module) as again, ExitStack() as hooks, torch.enable_grad():
            for at, (layer, region) in enumerate(self._modules):
                if region is not None and region() is module:
                    _hook(hooks, layer(), partial(note, at))
            whole = again(*first(args), **first(kwargs))
        output = next(each for each in tensors(whole) if each.requires_grad)
        gradient = gradient.reshape(output.shape).to(output.dtype)
        torch.autograd.grad(output, outputs, gradient, allow_unused=True)

    def _guarded(self) -> AbstractContextManager[None]:
        return unnoticed(
            lambda error: self.notes.setdefault(f"a layer could not be sampled: {sentence(error)}")
        )


def _why_unseen(module: nn.Module, stack: str, region: Module | None) -> str | None:
    """Return why a layer's input and gradient cannot be sampled, or None."""
    if stack == TRANSFORMER_ENGINE:
        return TE_COMPILED if region is not None else None if casts_of(module) else NO_SCALES
    if not casts_of(module):
        return NO_SCALES
    whole = region() if region is not None else None
    parts = () if whole is None else (*modules_of(whole), *tensors_of(whole, "_parameters"))
    homes = {home for kind in {type(each) for _, each in parts} for home, _ in lineage(kind)}
    homes.discard(torch_private.CHECKPOINT_WRAPPERS)
    return SHARDED if any(home.startswith("torch.distributed") for home in homes) else None


def _hook(hooks: ExitStack, module: nn.Module | None, hook: Callable[..., None]) -> None:
    if module is not None:
        hooks.callback(module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)


@contextmanager
def rerun(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Give a call of the module that is not compiled and changes neither its modules nor random numbers.

    What its forward does elsewhere (it prints, it counts in a list of another object) happens once more.
    """
    inner, numpy = behind_compile(module) or module, sys.modules.get("numpy.random")
    states = [(state, contents(state)) for _, each in modules_of(inner) if (state := state_of(each))]
    buffers = {name: each.clone() for name, each in tensors_of(inner, "_buffers")}
    kept = random.getstate(), numpy.get_state() if numpy else None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
        try:
            yield lambda *args, **kwargs: torch.func.functional_call(inner, buffers, args, kwargs)
        finally:
            for state, before in states:
                restore(state, before)
            random.setstate(kept[0])
            if numpy:
                numpy.set_state(kept[1])


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


def _few(batch: torch.Tensor) -> tuple[int, int]:
    """Return a batch's samples, and how many of them give rows that FP8 matmuls take: a multiple of 16."""
    size, *others = batch.shape or (1,)
    rows = math.prod(others[:-1] if batch.is_floating_point() else others)
    return size, min(size, ROWS // math.gcd(ROWS, rows))


def _first(tensor: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Take the first samples of a tensor with so many, for a graph of its own."""
    part = (tensor[:count] if tensor.ndim and tensor.shape[0] == size else tensor).detach()
    return part.requires_grad_().clone() if tensor.requires_grad else part


def torch_autocast(given: list[torch.Tensor]) -> Callable[[], AbstractContextManager[object]]:
    device = given[0].device.type if given else "cpu"
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled)


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
