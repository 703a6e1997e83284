"""Which of torchao's recipes run on this GPU, by a tiny GEMM of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fp8doctor.facts import Linear
from fp8doctor.facts.scrub import scrub
from fp8doctor.recipes import TORCHAO, of_stack
from fp8doctor.stacks.torch_private import scaled_mm

_log = logging.getLogger("fp8doctor")

SIDE = 64
"""Rows and columns of a GEMM that is tried; ``_scaled_mm`` asks for multiples of 16."""


def try_recipes(linears: Iterable[Linear]) -> dict[str, str | None]:
    """Tell why a tiny GEMM of each torchao recipe in the model failed on this GPU, None where it ran.

    Empty before CUDA is initialized in this process, which to try would do, and on AMD.
    """
    if not cuda_in_use() or scaled_mm() is None:
        return {}
    used = {
        each.recipe
        for each in linears
        if each.stack == TORCHAO.name and each.use == "training" and not each.features.get("emulate")
    }
    return {
        each.name: try_scaled_mm(each.granularity == "row", "cuda")
        for each in of_stack(TORCHAO.name)
        if each.tried and each.name in used
    }


def cuda_in_use() -> bool:
    """Whether this process has initialized CUDA, and not HIP, so that a try creates no context."""
    import torch

    cuda: Any = torch.cuda
    return cuda.is_initialized() and not torch.version.hip


def try_scaled_mm(by_row: bool, device: str) -> str | None:
    """Return the first line of what torch's FP8 matmul raises, or None. A valid call: it is refused before
    a kernel starts, or runs."""
    import torch

    product = scaled_mm()
    assert product is not None
    try:
        with torch.no_grad():
            left = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
            shapes = ((SIDE, 1), (1, SIDE)) if by_row else ((), ())
            scales = [torch.ones(shape, dtype=torch.float32, device=device) for shape in shapes]
            product(
                left, left.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
            ).float().sum().item()
    except Exception as error:
        _log.debug("an FP8 product failed", exc_info=True)
        return scrub(f"{type(error).__name__}: {error}".splitlines()[0])
    return None
