"""The time of the casts around the FP8 GEMMs of one Linear: bytes moved, or launches where there is little to move.

Bytes are effective: the time at the bandwidth of a copy (`fp8doctor.cost.gpus.MEMORY_EFFICIENCY`), so a kernel that writes
a transposed copy counts more than it moves. All of one H200, torch 2.11, torchao 0.18, November 2026.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.cost.gemm import KERNEL_LAUNCH_MS
from fp8doctor.cost.gpus import GpuSpec, memory_ms

EAGER_CAST_BYTES = 63.0
"""Bytes per element of one uncompiled torchao cast, fitted to the casts of two decoders: 273.6 ms at width 1024 gives 61,
117.1 ms at width 4096 gives 65."""

EAGER_CASTS = 2
"""Times each of input, weight and output gradient is cast in one step: once for each layout."""


class CastBytes(NamedTuple):
    """Bytes per element of all casts of one step together."""

    activation: float
    """Of input and output gradient each."""
    weight: float


COMPILED_CAST_BYTES = {
    "tensorwise": CastBytes(9.0, 17.0),
    "rowwise": CastBytes(25.0, 37.0),
    "rowwise_with_gw_hp": CastBytes(6.4, 13.0),
}
"""torchao's recipes, compiled. Counted in ``roofline_utils`` (0.18) they are 6 and 8, 8 and 10, 3 and 6; measured:

- tensorwise: kernel time of two compiled decoders beside that of their BF16 twins, all but GEMMs, attention and optimizer,
  21.0 ms more at width 1024 and 10.0 at 4096.
- rowwise: what a layer takes longer than with tensorwise, 2.24 ms in a Llama 8B (4096 tokens) and 5.43 in a 70B (2048
  tokens), scaling the gradients after their GEMM included.
- rowwise_with_gw_hp: a decoder of width 1024 with every block checkpointed takes 110.4 ms a step and 107.8 with tensorwise,
  although a third of its GEMMs stay in BF16; the weight keeps the ratio of the counts."""

COMPILED_CAST_KERNELS = 9
"""Extra kernels per compiled Float8Linear and step, counted (8.7 and 9.2)."""


TE_CAST_BYTES = {"delayed": 4.7, "current": 6.8}
"""Transformer Engine: bytes per element of input, weight and output gradient: 0.435 and 0.638 ms at (16384, 4096, 16384)."""


def casts_ms(m: int, k: int, n: int, gpu: GpuSpec, *, compiled: bool, recipe: str = "tensorwise") -> float:
    """Time torchao's casts of one Linear take in one step: input (M, K), weight (K, N), gradient (M, N).

    Uncompiled, what was measured of ``tensorwise`` stands for every recipe.
    """
    if not compiled:
        return memory_ms(EAGER_CASTS * EAGER_CAST_BYTES * (m * k + k * n + m * n), gpu)
    bytes_moved = COMPILED_CAST_BYTES[recipe].activation * (m * k + m * n)
    return max(memory_ms(bytes_moved, gpu) + weight_casts_ms(k, n, gpu, recipe=recipe), COMPILED_CAST_KERNELS * KERNEL_LAUNCH_MS)


def weight_casts_ms(k: int, n: int, gpu: GpuSpec, *, recipe: str = "tensorwise") -> float:
    """The part of it, compiled, that is the weight's and does not depend on the tokens."""
    return memory_ms(COMPILED_CAST_BYTES[recipe].weight * k * n, gpu)
