"""fused-attention-on: torch's attention with the backends that the process has switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8doctor.examine.attention import sdp_backends
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant

ALL = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]


def fused_attention_on(variant: Variant, context: TreatmentContext) -> Variant:
    """Run forward and loss with every backend allowed; torch takes the fastest that fits each call, as by
    default."""
    if {"flash", "mem_efficient", "cudnn"}.issubset(sdp_backends()):
        raise NotTried("no fused backend is switched off")
    outer = variant.around

    @contextmanager
    def around() -> Iterator[None]:
        with outer(), sdpa_kernel(ALL):
            yield

    return replace(variant, around=around)
