"""The matmuls and FP8 casts of one Linear in a training step, to be timed alone.

Layouts are those of torchao 0.18 (``float8_linear.py``, ``float8_ops.py``) and Transformer Engine. Under
rowwise scaling the gradient matmuls run with the tensorwise kernel, as in torchao; the pass over their output
is left out, because the compiler may fuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8doctor.facts import LayerShape, Layout
from fp8doctor.recipes import named
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import frames_compiled, mark_dynamic
from fp8doctor.trial.copies.compiling import clone_function

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Operation = Callable[[], object]


@dataclass(frozen=True)
class Operands:
    """Operands of one Linear in a step: input (M, K), weight (N, K), output gradient (M, N)."""

    input: Tensor
    weight: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: LayerShape, device: torch.device) -> Operands:
        generator = torch.Generator(device).manual_seed(0)
        sides = ((shape.m, shape.k), (shape.n, shape.k), (shape.m, shape.n))
        empty = (torch.empty(each, dtype=torch.bfloat16, device=device) for each in sides)
        return cls(*(each.normal_(generator=generator) for each in empty))


def bf16_gemms(of: Operands, trained: bool) -> dict[Layout, Operation]:
    gemms: dict[Layout, Operation] = {
        "output": lambda: of.input @ of.weight.t(),
        "input_gradient": lambda: of.gradient @ of.weight,
    }
    return gemms | {"weight_gradient": lambda: of.gradient.t() @ of.input} if trained else gemms


def fp8_gemms(of: Operands, shape: LayerShape, fast: bool) -> dict[Layout, Operation]:
    """Compute the same in FP8, without what the recipe leaves in BF16.

    A transposed copy is replaced by the same memory in another shape: its values do not change the time.
    """
    m, k, n = shape.m, shape.k, shape.n
    input, weight = of.input.to(E4M3), of.weight.to(E4M3)
    gradient = of.gradient.to(gradient_dtype(shape.recipe))
    one = torch.ones((), dtype=torch.float32, device=input.device)  # whatever the default dtype is
    rows = columns = one
    if named(shape.recipe).granularity == "row":
        rows, columns = one.new_ones((m, 1)), one.new_ones((1, n))
    gemms: dict[Layout, Operation] = {
        "output": lambda: scaled_mm(input, weight.t(), rows, columns, fast=fast),
        "input_gradient": lambda: scaled_mm(gradient, weight.view(k, n).t(), one, one, fast=False),
    }
    if not shape.trained or named(shape.recipe).weight_gradient_in_16_bits:
        return gemms
    left, right = gradient.view(n, m), input.view(k, m).t()
    return gemms | {"weight_gradient": lambda: scaled_mm(left, right, one, one, fast=False)}


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast: bool) -> Tensor:
    """Run one FP8 matmul with BF16 output, as torchao and plain torch call it (torch 2.6 to 2.13).

    ``fast`` accumulates with less precision.
    """
    product = torch_private.scaled_mm()
    assert product is not None
    result: Tensor = product(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return result


ALIGNED = 8
"""Unit of K and N, in elements. It tells the compiler that rows begin at 16 bytes of BF16, as in a step.

K and N have to be at least two units: torch.compile specializes a size of one.
"""

OPEN_SIDES = ((1,), (0, 2), (0, 2), (1,))
"""Dimensions of the tensors of `cast_arguments` that are K or N, in units of `ALIGNED`."""


def gradient_dtype(recipe: str) -> torch.dtype:
    """Return the dtype of the output gradient. Source: torchao 0.18 ``Float8LinearConfig.from_recipe_name``;
    TE's format HYBRID."""
    return E4M3 if recipe.startswith("rowwise") else E5M2


def cast_arguments(of: Operands) -> tuple[Tensor, ...]:
    """Make the arguments of `casts`, with open sides split by `ALIGNED`.

    The weight is there twice: in a step, forward and backward are two graphs and share no cast of it.
    """
    (m, k), n = of.input.shape, of.weight.shape[0]
    weight = of.weight.view(n // ALIGNED, ALIGNED, k // ALIGNED, ALIGNED)
    input, gradient = of.input.view(m, k // ALIGNED, ALIGNED), of.gradient.view(m, n // ALIGNED, ALIGNED)
    return input, weight, weight.clone(), gradient


def compiled_casts(recipe: str, trained: bool, example: tuple[Tensor, ...]) -> Callable[..., object]:
    """Compile `casts` for any K and N; the compiler tunes for the example's sizes.

    K and N of the example have to differ, because equal sizes become one symbol. The function is a clone with
    its own code object, so nothing stays in Dynamo's caches. Raises RuntimeError if torch.compile compiles
    nothing.
    """
    function: Callable[..., object] = torch.compile(clone_function(casts))  # type: ignore[arg-type]
    before = frames_compiled()
    for tensor, sides in zip(example, OPEN_SIDES, strict=True):
        for side in sides:
            mark_dynamic(tensor, side)
    function(recipe, trained, *example)
    if frames_compiled() == before:
        raise RuntimeError("torch.compile compiles nothing in this process")
    return function


def casts(
    recipe: str, trained: bool, input: Tensor, weight: Tensor, again: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Cast input, weight and gradient to FP8 in the matmuls' layouts; a frozen weight has no gradient.

    torchao's recipes are those of its ``float8_linear.py`` (0.18). Transformer Engine casts the weight once
    into both layouts, and under delayed scaling knows the scales beforehand. Its own kernels move the same
    bytes.
    """
    input, gradient = input.flatten(1), gradient.flatten(1)
    weight, again = weight.flatten(2).flatten(0, 1), again.flatten(2).flatten(0, 1)
    dtype = gradient_dtype(recipe)
    if recipe.startswith("rowwise"):
        forward = (_cast(input, dim=1), _cast(weight, dim=1), _cast(gradient, dim=1))
        if recipe == "rowwise_with_gw_hp":
            return (*forward, _transposed(_cast(again)))
        transposed = (again, input, gradient) if trained else (again,)
        return (*forward, *(_transposed(_cast(each, dim=0)) for each in transposed))
    known = input.new_ones((), dtype=torch.float32) if recipe == "delayed" else None
    input, gradient = _cast(input, known), _cast(gradient, known, dtype)
    if recipe == "tensorwise":
        scale = _scale(weight, E4M3)
        weights = (_cast(weight, scale), _transposed(_cast(again, scale)))
    else:
        weight = _cast(weight, known)
        weights = (weight, _transposed(weight))
    return (input, gradient, *weights, *((_transposed(input), _transposed(gradient)) if trained else ()))


def _scale(x: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Scale the largest magnitude, of all or along one dimension, to the largest value of the dtype.

    torchao divides in double precision. In single precision one tensor in thirty has other bits.
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
