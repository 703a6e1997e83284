"""How much of a result FP8 loses: its distance from a reference, and what casts to FP8 clip or turn to
zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

CHUNK = 1 << 22
"""Elements that are compared at a time, in fp32."""


@dataclass(frozen=True)
class Difference:
    """How far a result is from its reference."""

    sqnr_db: float | None
    typical_sqnr_db: float | None
    """Median over the rows that are not all zero in the reference."""
    non_finite: int

    @classmethod
    def of(cls, reference: torch.Tensor, result: torch.Tensor) -> Difference:
        reference = (
            reference.reshape(-1, reference.shape[-1]) if reference.ndim > 1 else reference.reshape(1, -1)
        )
        result = result.reshape(reference.shape)
        powers = [_powers(*rows) for rows in _chunks(reference, result)]
        signal, noise, worse = (torch.cat(each) for each in zip(*powers, strict=True))
        rows = (signal > 0) & signal.isfinite() & noise.isfinite()
        typical = float((signal[rows] / noise[rows]).median()) if bool(rows.any()) else 0.0
        return cls(
            _decibels(float(signal.sum()) / float(noise.sum())) if bool(noise.any()) else None,
            _decibels(typical),
            int(worse.sum()),
        )


def _powers(reference: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the power of each row, that of the difference, and how many elements only the reference has
    finite."""
    a, b = reference.float(), result.float()
    worse = a.isfinite() & ~b.isfinite()
    return a.square().sum(1, dtype=torch.float64), (a - b).square().sum(1, dtype=torch.float64), worse.sum(1)


def _chunks(*matrices: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    rows = max(1, CHUNK // max(1, matrices[0].shape[1]))
    return zip(*(torch.split(each, rows) for each in matrices), strict=True)


def _decibels(ratio: float) -> float | None:
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches casts to FP8 that are written in torch: what they clip, and what they turn to zero."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clipped: list[torch.Tensor] = []
        self._flushed: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten.clamp.default
            and len(args) == 3
            and (limit := _largest(args[1], args[2])) is not None
        ):
            self._clipped.append(_share(args[0].abs() > limit, args[0].numel()))
        elif func is torch.ops.aten._to_copy.default and result.dtype in FP8_TYPES:
            before = args[0]
            limit = _largest(-torch.finfo(result.dtype).max, torch.finfo(result.dtype).max)
            self._clipped.append(_share(before.abs() > limit, before.numel()))
            present = before != 0
            self._flushed.append(_share(present & (result.bfloat16() == 0), present.sum().clamp(min=1)))
        return result

    def shares(self) -> tuple[float | None, float | None]:
        """Return the largest share, in per cent, that one cast clipped, and that one turned to zero; None
        without a cast."""
        return tuple(
            max(float(each) for each in shares) if self._flushed else None
            for shares in (self._clipped, self._flushed)
        )  # type: ignore[return-value]


def _share(which: torch.Tensor, of: int | torch.Tensor) -> torch.Tensor:
    return 100 * which.sum() / of


def _largest(low: Any, high: Any) -> float | None:
    """Return the magnitude that rounds beyond the largest of an FP8 type; None for bounds that are no such
    type's."""
    for dtype in FP8_TYPES:
        information = torch.finfo(dtype)
        if high == information.max and low == -high:
            return information.max + information.eps * 2.0 ** math.floor(math.log2(information.max)) / 2
    return None
