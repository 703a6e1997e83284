"""A stand-in for the FP8 GEMM of a CPU, which torch 2.6 lacks: what Dynamo, torchao and Accelerate do around
it is real.

It computes in FP32 and says nothing about the kernel or its time: a test of those is skipped by the mark.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor


def runs() -> bool:
    """Whether this torch multiplies FP8 on a CPU."""
    matrix, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(matrix, matrix.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    except (NotImplementedError, RuntimeError):
        return False
    return True


PER_TENSOR = runs()

needs_scaled_mm = pytest.mark.skipif(
    not PER_TENSOR, reason="this torch has no _scaled_mm for a CPU, as 2.6 has none"
)


def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """One scale for all, or one for each row of the first and each column of the second."""
    product = (self.float() * scale_a) @ (mat2.float() * scale_b)
    return (product if bias is None else product + bias).to(out_dtype or self.dtype)


@contextmanager
def installed_where_missing() -> Iterator[None]:
    if PER_TENSOR:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_mm", scaled_mm, "CPU")
    try:
        yield
    finally:
        library._destroy()
