"""The time of one matmul by its shape: tiles in waves, or bytes of operands.

A matmul is cut into tiles; each wave gives every multiprocessor one, so a last wave that is nearly empty
costs as much as a full one, and few tiles leave multiprocessors idle unless the reduction is split. A short K
does not hide what starting and ending a tile takes. cuBLAS chooses by rules of its own; the best of a few
tiles is close enough.

`research/benchmarks/calibrate_cost.py` derives the constants again from a recorded sweep, and `cost_model.py`
says how far they are off.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fp8doctor.facts import Linear
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import RECIPES, Recipe, named

GEMM_EFFICIENCY_BF16 = 0.88
"""Share of the peak rate inside the tiles of a BF16 matmul at the full clock. Fitted, with the tile's part of
`BACK_TO_BACK`, to 1290 swept matmuls: one H200, torch 2.11, November 2026,
research/benchmarks/measured/h200_sweep.json.gz."""


GEMM_EFFICIENCY_FP8 = 0.86
"""The same for FP8, e4m3 x e4m3 and e5m2 x e4m3 alike."""


class Pace(NamedTuple):
    """Share of a matmul's speed that the power limit leaves."""

    clock: float
    """Share of the full clock."""
    tile_ms: float
    """Time to start and end a tile and to write its output that the next one does not hide: it makes a short
    K slow."""


BACK_TO_BACK = Pace(0.84, 0.003)
"""Matmul after matmul: the clock is that of 16384 x 4096 x 16384 after seconds of itself / after a rest (1500
MHz, 690 W, BF16 and FP8 alike). Same sweep."""


IN_A_STEP = Pace(0.88, 0.0011)
"""In a training step, where casts, attention and norms let the GPU recover and operands may still be in the
L2: fitted to the matmuls of a compiled decoder of width 1024 (55.1 ms in BF16, 30.6 in FP8) and of a Llama 8B
(239.5 and 125.3), all within 3%."""


TILES = ((256, 128), (128, 256), (320, 128), (128, 320), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows, columns. Most of these are in the names of kernels seen on an H200
(``nvjet_sm90_tst_256x128_64x4_...``)."""


SPLITS = (1, 2, 4, 8, 16)
"""Parts of the reduction that run next to each other (``splitK`` in the kernel names)."""


SHORTEST_SPLIT = 2048
"""Least K of one part, from the same sweep."""


MULTIPLE = 8
"""Elements: rows of BF16 matrices whose lengths are no multiple of it are not aligned to 16 bytes."""


UNALIGNED = 0.16
"""Rate with such rows: the three matmuls of a head of 1024 x 50257 and 16384 tokens take 44.0 ms in the same
sweep, those of 50304 take 6.9 (research/benchmarks/results/padded_vocabulary_h200.md)."""


KERNEL_LAUNCH_MS = 0.002
"""Start and end of a kernel. torchao's ``roofline_utils.KERNEL_LAUNCH_OVERHEAD_SEC``; in the sweep 0.002 and
0.0025 fit alike."""


LARGE = (16384, 4096, 16384)
"""(M, K, N) at which FP8 is near its best: 1.87x in the sweep, where matmuls longer than 1 ms in BF16 have
1.93x in the median."""


KEPT = 1 << 17
"""Modelled matmuls that are kept. A Linear in BF16 and FP8 has six, and a report models its step about 35
times: 10,000 Linears, no two alike, have to fit. Each takes about 0.3 kB."""


@lru_cache(maxsize=KEPT)
def gemm_ms(
    m: int, k: int, n: int, gpu: GpuSpec, *, fp8: bool, pace: Pace = IN_A_STEP, groups: int = 1
) -> float | None:
    """Model one (M, K) x (K, N) matmul with BF16 output: launch, compute or memory.

    It is one of ``groups`` in the same kernel. None if ``fp8`` is asked for and the GPU has no FP8 tensor
    cores.
    """
    if fp8 and gpu.fp8_tflops is None:
        return None
    peak = (
        gpu.fp8_tflops * GEMM_EFFICIENCY_FP8
        if fp8 and gpu.fp8_tflops
        else gpu.bf16_tflops * GEMM_EFFICIENCY_BF16
    )
    aligned = 1.0 if not (m % MULTIPLE or k % MULTIPLE or n % MULTIPLE) else UNALIGNED
    per_multiprocessor = peak * pace.clock * aligned * 1e9 / gpu.multiprocessors
    compute = min(
        ceil(groups * ceil(m / rows) * ceil(n / columns) * split / gpu.multiprocessors)
        / groups
        * (2.0 * rows * columns * k / split / per_multiprocessor + pace.tile_ms)
        + (
            memory_ms(8.0 * split * m * n, gpu) if split > 1 else 0.0
        )  # partial sums in FP32, written and read
        for rows, columns in TILES
        for split in SPLITS
        if split == 1 or k >= split * SHORTEST_SPLIT
    )
    operand_bytes = 1 if fp8 else 2
    return KERNEL_LAUNCH_MS / groups + max(
        compute, memory_ms(operand_bytes * (m * k + k * n) + 2 * m * n, gpu)
    )


def step_gemms_ms(
    m: int,
    k: int,
    n: int,
    gpu: GpuSpec,
    *,
    fp8: bool,
    weight_gradient: bool = True,
    recipe: Recipe | str | None = None,
    groups: int = 1,
) -> float | None:
    """Model the matmuls of one Linear in one step: output and gradients.

    Some recipes leave the weight gradient in BF16. Rows of activations are as long as their features, so the
    number of tokens costs no alignment.
    """
    of, m = recipe if isinstance(recipe, Recipe) else named(recipe), aligned_tokens(m)
    shapes = [(m, k, n), (m, n, k), (k, m, n)][: 3 if weight_gradient else 2]
    times = [
        scaled_gemm_ms(*shape, gpu, of, groups=groups)
        if fp8 and not (index == 2 and of.weight_gradient_in_16_bits)
        else gemm_ms(*shape, gpu, fp8=False, groups=groups)
        for index, shape in enumerate(shapes)
    ]
    return None if None in times else sum(time for time in times if time is not None)


def scaled_gemm_ms(
    m: int, k: int, n: int, gpu: GpuSpec, recipe: Recipe, *, pace: Pace = IN_A_STEP, groups: int = 1
) -> float | None:
    """Model one matmul of a recipe; None if the GPU has no tensor cores for it."""
    time = gemm_ms(m, k, n, gpu, fp8=True, pace=pace, groups=groups)
    if time is None or gpu.fp8_tflops is None or (recipe.in_fp4 and gpu.fp4_tflops is None):
        return None
    peak = gpu.fp4_tflops if recipe.in_fp4 and gpu.fp4_tflops else gpu.fp8_tflops
    return time * recipe.matmul_times * gpu.fp8_tflops / peak


def aligned_tokens(tokens: int) -> int:
    """Round tokens up to `MULTIPLE`: no matrix in memory has rows of this length."""
    return ceil(tokens / MULTIPLE) * MULTIPLE


def large_gemm_speedup(gpu: GpuSpec) -> float:
    """Return a large FP8 matmul's speedup over BF16; 1 without FP8 tensor cores."""
    bf16, fp8 = (gemm_ms(*LARGE, gpu, fp8=in_fp8) for in_fp8 in (False, True))
    return bf16 / fp8 if bf16 and fp8 else 1.0


def amdahl(share: float, speedup: float) -> float:
    """Compute the speedup of a whole of which ``share`` is ``speedup`` times as fast.

    60% at 1.5x gives 1.25x, 80% gives 1.36x. Raises ValueError outside 0 to 1. Source: Amdahl, AFIPS 1967.
    """
    if not 0.0 <= share <= 1.0 or speedup <= 0.0:
        raise ValueError(f"a share of 0 to 1 and a positive speedup are needed, not {share} and {speedup}")
    return 1.0 / (1.0 - share + share / speedup)


class LinearCost(NamedTuple):
    """Time of all matmuls of a layer in one step, in ms, without casts."""

    bf16_ms: float
    fp8_ms: float

    @property
    def saved_ms(self) -> float:
        return self.bf16_ms - self.fp8_ms


def linear_cost(linear: Linear, rows: int, gpu: GpuSpec, *, own_recipe: bool = True) -> LinearCost | None:
    """Model one layer with these rows; None if the GPU has no FP8 tensor cores.

    Without ``own_recipe`` all its matmuls are in FP8, whatever its recipe leaves in BF16.
    """
    shape = (rows, linear.in_features, linear.out_features)
    trained = linear.requires_grad is not False
    name = linear.get("recipe") if own_recipe else None
    recipe = RECIPES.get((linear.get("stack", ""), name or ""), name)
    bf16 = step_gemms_ms(*shape, gpu, fp8=False, weight_gradient=trained)
    fp8 = step_gemms_ms(*shape, gpu, fp8=True, weight_gradient=trained, recipe=recipe)
    return None if bf16 is None or fp8 is None else LinearCost(bf16, fp8)
