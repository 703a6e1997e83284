"""Every cast of one FP8 Linear in one step, as plain operations that torch.compile fuses.

They are compiled once, for any K and N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fp8doctor.stacks.torch_private import mark_dynamic
from fp8doctor.trial.copies.compiling import clone_function
from fp8doctor.trial.measure.evidence import compiled_so_far

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

ALIGNED = 8
"""Unit of K and N, in elements. The compiler learns from it that rows begin where 16 bytes of BF16 do, as it
knows in a step.

The least K or N has two such units: a size of one is never left open.
"""

OPEN_SIDES = ((1,), (0, 2), (0, 2), (1,))
"""Sides of the tensors of `arguments` that are K or N, counted in `ALIGNED`."""

Kind = tuple[str, bool]
"""Recipe, and whether the weight is trained."""


def gradient_dtype(recipe: str) -> torch.dtype:
    """Return the dtype of the output gradient. Source: torchao 0.18 ``Float8LinearConfig.from_recipe_name``;
    TE's format HYBRID."""
    return E4M3 if recipe.startswith("rowwise") else E5M2


def arguments(input: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Make what `casts` takes of input (M, K), weight (N, K) and output gradient (M, N), open sides split by
    `ALIGNED`.

    The weight is there twice: in a step forward and backward are two graphs, which share no cast of it.
    """
    (m, k), n = input.shape, weight.shape[0]
    split = weight.view(n // ALIGNED, ALIGNED, k // ALIGNED, ALIGNED)
    return input.view(m, k // ALIGNED, ALIGNED), split, split.clone(), gradient.view(m, n // ALIGNED, ALIGNED)


def compiled(examples: Iterable[tuple[Kind, tuple[Tensor, ...]]]) -> Callable[..., object]:
    """Compile `casts` once for each kind, K and N left open; the sizes of the example are what the compiler
    tunes for.

    K and N of an example have to differ: equal sizes become one. The function is a clone with a code object
    of its own, so that nothing of it stays in Dynamo's caches. Raises RuntimeError where torch.compile
    compiles nothing.
    """
    function: Callable[..., object] = torch.compile(clone_function(casts))  # type: ignore[arg-type]
    before = compiled_so_far()
    for kind, tensors in examples:
        for tensor, sides in zip(tensors, OPEN_SIDES, strict=True):
            for side in sides:
                mark_dynamic(tensor, side)
        function(*kind, *tensors)
    if compiled_so_far() == before:
        raise RuntimeError("torch.compile compiles nothing in this process")
    return function


def casts(
    recipe: str, trained: bool, input: Tensor, weight: Tensor, again: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Cast input, weight and gradient to FP8 in the layouts that the GEMMs want; a frozen weight has no
    weight gradient.

    torchao's recipes are those of its ``float8_linear.py`` (0.18). Transformer Engine casts the weight once,
    into both layouts, and knows the scales beforehand under delayed scaling; its own kernels move the same
    bytes.
    """
    input, gradient = input.flatten(1), gradient.flatten(1)
    weight, again = weight.flatten(2).flatten(0, 1), again.flatten(2).flatten(0, 1)
    dtype = gradient_dtype(recipe)
    if recipe.startswith("rowwise"):
        forward = (_cast(input, dim=1), _cast(weight, dim=1), _cast(gradient, dim=1))
        if recipe == "rowwise_with_gw_hp":
            return (*forward, _transposed(_cast(again)))
        backward = (_transposed(_cast(again, dim=0)),)
        return (
            *forward,
            *backward,
            *((_transposed(_cast(input, dim=0)), _transposed(_cast(gradient, dim=0))) if trained else ()),
        )
    scales = [
        each.new_ones((), dtype=torch.float32) if recipe == "delayed" else None
        for each in (input, weight, gradient)
    ]
    input, gradient = _cast(input, scales[0]), _cast(gradient, scales[2], dtype)
    if recipe == "tensorwise":
        scale = _scale(weight, E4M3)
        weights = (_cast(weight, scale), _transposed(_cast(again, scale)))
    else:
        weight = _cast(weight, scales[1])
        weights = (weight, _transposed(weight))
    return (input, gradient, *weights, *((_transposed(input), _transposed(gradient)) if trained else ()))


def _scale(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Scale the largest magnitude, of all or along one dimension, to the largest value of the dtype.

    torchao divides in double precision; in single, one tensor in thirty has other bits.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()


def _cast(
    x: Tensor, scale: Tensor | None = None, dtype: torch.dtype = E4M3, dim: int | None = None
) -> Tensor:
    most = torch.finfo(dtype).max
    return (x.float() * (_scale(x, dtype, dim) if scale is None else scale)).clamp(-most, most).to(dtype)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()
