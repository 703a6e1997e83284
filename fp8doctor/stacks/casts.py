"""Measure casts to FP8: rounding error, saturated, flushed and non-finite elements.

A stack describes its layers' casts (`fp8doctor.stacks.casts_of`): type, scale in use, amax history. Casts of
other layers are watched while the layer runs alone (`Casts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8doctor.stacks import Cast

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

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


def decibels(ratio: float) -> float | None:
    """Convert a ratio of powers; None for 0, infinity and NaN."""
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches casts to FP8 that are written in torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.Tensor, str]] = []
        """Each cast's scaled tensor, before it is clipped, and its FP8 type."""
        self._before_clipping: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clamp.default and len(args) == 3:
            if any(args[2] == torch.finfo(kind).max == -args[1] for kind in FP8_TYPES):
                self._before_clipping[id(result)] = (result, args[0])
        elif func is torch.ops.aten._to_copy.default and result.dtype in FP8_TYPES:
            whole = self._before_clipping.get(id(args[0]), (args[0], args[0]))[1]
            self.seen.append((whole, str(result.dtype).removeprefix("torch.")))
        return result
