"""What the sides of a layer's FP8 GEMMs have to be multiples of, by its recipe and its library."""

from __future__ import annotations

from fp8doctor.facts import Linear

MULTIPLE = 16
"""Elements; tensorwise, rowwise and delayed scaling. Source: torch ``_check_scaled_mm_sizes``; TE asks in %16
and out %8 of a forward, and 16 of both for the backward."""

MX_MULTIPLE = 32
"""Elements; one scale for each block of 32. Source: OCP Microscaling Formats specification 1.0."""

BLOCK_MULTIPLE = 128
"""Elements; torchao's blockwise scaling and NVFP4. Source: torchao 0.18 ``blockwise_fp8_training``,
``nvfp4_training``. Transformer Engine pads its blocks: 16 is enough (2.19 ``cublaslt_gemm.cu:209``,
``quantizer.cpp:1982``)."""

TE_FORWARD_TOKENS = 8
"""Elements; tokens of a te.Linear whose weight is frozen, so that no GEMM has them inside. Source: TE
``assert_dim_for_fp8_exec``; MXFP8 and NVFP4 quantize no other tokens than whole blocks (2.19
``quantizer.cpp:1514 and 1982``)."""


def multiple_of(linear: Linear) -> int:
    """Tell what in and out of this layer must be multiples of, by its recipe or its class.

    A layer that a user wrote over torch's GEMM may pad, or fall back to an ordinary one.
    """
    if linear.stack == "own":
        return 1 if linear.features.get("any_side") else MULTIPLE
    words = f"{linear.recipe or ''} {linear.kind.rpartition('.')[2]} {linear.weight_class or ''}".lower()
    if "mx" in words:
        return MX_MULTIPLE
    in_blocks = linear.stack != "transformer_engine" and ("nvfp4" in words or "block" in words)
    return BLOCK_MULTIPLE if in_blocks else MULTIPLE


def unaligned(linear: Linear) -> bool:
    """Whether an FP8 GEMM refuses this layer's weight."""
    multiple = multiple_of(linear)
    return linear.in_features % multiple != 0 or linear.out_features % multiple != 0


def tokens_divisor(linear: Linear) -> int:
    """Tell what the tokens must be a multiple of for this FP8 layer; 1 when none of its FP8 GEMMs has them
    inside.

    The tokens of one expert change from step to step and are nobody's to pad here. What a user's own layer
    makes of them is unknown: its weight gradient may stay in BF16.
    """
    if linear.role == "experts" or linear.stack == "own":
        return 1
    if linear.stack == "transformer_engine":
        whole_blocks = linear.recipe in ("mxfp8", "nvfp4")
        return multiple_of(linear) if linear.requires_grad or whole_blocks else TE_FORWARD_TOKENS
    if linear.recipe == "rowwise_with_gw_hp" or linear.features.get("pad_inner_dim"):
        return 1
    return multiple_of(linear)
