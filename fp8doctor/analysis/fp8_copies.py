"""FP8 weights that Transformer Engine keeps beside the ones that are trained."""

from __future__ import annotations

from fp8doctor.cost import gemms
from fp8doctor.facts import Facts, Linear, recorded

NEEDS_TRANSPOSED = ("8.9", "9.0", "12.0", "12.1")
"""Compute capabilities whose FP8 GEMMs take one layout only. Source: ``is_non_tn_fp8_gemm_supported`` in
``pytorch/utils.py`` of Transformer Engine 2.20; NVIDIA/TransformerEngine #1880."""


def keeps_copies(linear: Linear) -> bool:
    """Whether Transformer Engine keeps FP8 copies beside this weight."""
    return linear.stack == "transformer_engine" and not (
        recorded(linear, "features") and linear.features.get("primary_weights_in_fp8")
    )


def copies_gib(facts: Facts, layers: list[Linear]) -> float:
    """Sum up FP8 copies of these weights: one each, or two where the GPU's GEMMs need the transposed one
    too."""
    gpu = next((gpu for gpu in facts.gpus if gpu.visible), None) if recorded(facts, "gpus") else None
    copies = 2 if gpu is None or gpu.compute_capability in NEEDS_TRANSPOSED else 1
    return copies * sum(linear.in_features * linear.out_features * gemms(linear) for linear in layers) / 2**30
