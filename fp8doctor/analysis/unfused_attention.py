"""Attention that a profiled step ran as batched GEMMs and a softmax: its time and its fp32 GEMMs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from fp8doctor.facts import Arm, KernelGroup, recorded

SHARE_PCT = 10.0
"""Share of the GPU's working time, in per cent, from which softmax, batched GEMMs and what lies between are
called attention. Of the step's time they would disappear where the GPU waits. A choice: small batched GEMMs
of other layers stay below."""

SOFTMAX_PCT = 5.0
"""Softmax / batched GEMMs, in per cent, from which the GEMMs are the softmax's. In attention it goes over
heads x tokens x tokens several times: 12 and more were measured on an H200 (T5 and Llama, eager and
compiled). A router's, beside the GEMMs of its experts, goes over tokens x experts: below 1."""

SOFTMAX = ("aten::_softmax", "aten::_softmax_backward_data", "aten::_safe_softmax")
BATCHED_GEMM = ("aten::bmm", "aten::baddbmm")
"""Operators of eager attention and of torch's math backend. The loss's is ``aten::_log_softmax``."""

FUSED = re.compile(r"flash|fmha|sdpa|cudnn::fusion|flex_attention|flex_decod", re.IGNORECASE)
"""Kernels of fused attention, by name."""


class PlainAttention(Struct, frozen=True):
    """Attention without a fused kernel in one profiled step of the deepest cut."""

    softmax_ms: float
    gemm_ms: float
    others_ms: float
    """Masks, scaling and dropout over the scores, where they were launched inside torch's attention."""
    share_pct: float
    """Of the time the GPU works."""
    beside_fused: bool
    """Whether other calls ran a fused kernel, as far as the kernels that are kept show."""
    of_fp32_gemms: float
    """Share of the step's fp32 GEMMs that are its own, 0 to 1: of those that no attention's operator
    encloses, as in a compiled graph."""

    @property
    def total_ms(self) -> float:
        return self.softmax_ms + self.gemm_ms + self.others_ms


def plain_attention(arm: Arm) -> PlainAttention | None:
    """Tell what the arm's step spends on it; None where that is little, or was not profiled."""
    breakdown = arm.breakdown if recorded(arm, "breakdown") else None
    if breakdown is None or not breakdown.reliable or not recorded(arm, "cuts") or not arm.step_ms:
        return None
    works_ms = (arm.cuts[-1].step_ms or 0.0) * min(1.0, breakdown.busy_ms / arm.step_ms)
    gemms = [group for group in breakdown.groups if group.operator in BATCHED_GEMM]
    attention = [group for group in breakdown.groups if group.family == "attention" and group not in gemms]
    plain = [group for group in attention if not FUSED.search(group.name)]
    softmax_ms, gemm_ms = _ms(group for group in plain if is_softmax(group)), _ms(gemms)
    total_ms = _ms(plain) + gemm_ms
    if (
        not works_ms
        or not gemm_ms
        or 100 * softmax_ms < SOFTMAX_PCT * gemm_ms
        or 100 * total_ms < SHARE_PCT * works_ms
    ):
        return None
    fp32_ms = _ms(group for group in breakdown.groups if group.family == "gemm_fp32")
    return PlainAttention(
        softmax_ms=softmax_ms,
        gemm_ms=gemm_ms,
        others_ms=total_ms - softmax_ms - gemm_ms,
        share_pct=100 * total_ms / works_ms,
        beside_fused=len(plain) < len(attention),
        of_fp32_gemms=_ms(group for group in gemms if group.family == "gemm_fp32") / fp32_ms
        if fp32_ms
        else 0.0,
    )


def is_softmax(group: KernelGroup) -> bool:
    """Whether these kernels are a softmax, by their operator or by the compiler's name."""
    compiled = group.name.startswith("triton_") and "_softmax" in group.name.replace("log_softmax", "")
    return group.operator in SOFTMAX or compiled


def _ms(groups: Iterable[KernelGroup]) -> float:
    return sum(group.time_ms for group in groups)
