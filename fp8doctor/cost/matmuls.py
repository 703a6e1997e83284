"""The matmuls of a step: their rows and counts, and the time of one by its shape.

`research/benchmarks/calibrate_cost.py` derives the constants again, `cost_model.py` has their error."""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fp8doctor.facts import Checkpointing, Facts, Linear, recorded
from fp8doctor.gpus import GpuSpec, memory_ms
from fp8doctor.recipes import TRANSFORMER_ENGINE, Recipe

EXPERTS_PER_LAUNCH = 8
"""Experts of a ``te.GroupedLinear`` that take the host as long as another te.Linear: 6.1 and 12.9 ms for 64
and 128 in BF16, 11.3 and 28.4 in delayed scaling, where a te.Linear takes 0.7 and 1.2. One H200,
research/benchmarks/measured/h200_grouped.json.gz."""


def step_tokens(facts: Facts) -> int | None:
    """Count the rows of the matmuls in one micro-batch; None if unknown."""
    tokens: int | None = facts.get("workload.tokens")
    return tokens


def micro_batches(facts: Facts) -> int:
    """Count the micro-batches per step; 1 if unknown."""
    return int(facts.get("workload.accumulate", 1))


def all_tokens(facts: Facts) -> int:
    """Count the tokens of a step, of all of its micro-batches; 1 for unknown ones."""
    return (step_tokens(facts) or 1) * micro_batches(facts)


def gemms(linear: Linear) -> int:
    """Count matmuls of the layer's shape in one forward; 1 if unknown."""
    return int(linear.get("gemms", 1))


def rows_of(linear: Linear, facts: Facts) -> int | None:
    """Return the rows of one call: counted, else a micro-batch's tokens, or None."""
    return max(rows_seen(linear, facts), default=0) or step_tokens(facts)


def calls_of(linear: Linear, facts: Facts) -> int:
    """Count the calls with so many rows in one forward; 1 if unknown."""
    seen = rows_seen(linear, facts)
    return max(1, round(sum(seen) / max(seen))) if any(seen) else 1


def rows_seen(linear: Linear, facts: Facts) -> tuple[int, ...]:
    """Return the rows of every call in one forward; empty if nobody counted them.

    The trial counts them on real tensors. Without one they are those of a forward on fake tensors.
    """
    timed, fake = facts.get("trial.rows", {}), facts.get("workload.rows", {})
    return (timed.get(linear.name) or fake.get(linear.name, ())) if timed or fake else ()


def is_grouped(linear: Linear) -> bool:
    return linear.get("role") == "experts" and gemms(linear) > 1


def one_by_one(linear: Linear) -> bool:
    """Return whether the host launches each expert: those of a te.GroupedLinear, which Dynamo leaves out."""
    te = TRANSFORMER_ENGINE.name in (linear.get("stack"), linear.get("kind", "").partition(".")[0])
    return te and is_grouped(linear)


def launches(linear: Linear, share: float = 1.0) -> float:
    """Return the host's time for all matmuls of a layer / that for one Linear, in one call.

    ``share`` of the experts' launches are made: in FP8 those are the casts of weights, which may be kept.
    """
    if one_by_one(linear):
        return 1.0 + share * gemms(linear) / EXPERTS_PER_LAUNCH
    return 1.0 if is_grouped(linear) else gemms(linear)


def passes(linear: Linear) -> int:
    """Count the matmuls of one call, its backward included, from the FLOPs per token: 1 to 3."""
    most = 3 if linear.get("requires_grad") is not False else 2
    flops = float(linear.get("flops_per_token") or 0)
    if not flops or linear.get("role") == "experts":
        return most
    one = 2.0 * linear.in_features * linear.out_features * gemms(linear)
    return min(most, max(1, round(flops / one)))


def routed_rows(linear: Linear, facts: Facts) -> int | None:
    """Count the rows of all experts of a weight: as seen, else tokens times visits.

    None if neither is known.
    """
    if seen := rows_seen(linear, facts):
        return sum(seen)
    tokens, flops = step_tokens(facts), float(linear.get("flops_per_token") or 0)
    if not tokens or not flops:
        return None
    products = 3 if linear.requires_grad is not False else 2
    return round(tokens * flops / (2.0 * products * linear.in_features * linear.out_features))


TE_RECOMPUTE_HOST_MS = 0.97
"""What recomputing an FP8 layer of Transformer Engine adds on the host: (29.8 - 14.2) / 16 in one recording,
h200-te_checkpointed_inside. No step is modelled that this would set the pace of."""


def covers(region: Checkpointing, linear: Linear) -> bool:
    """Return whether a layer is below the module whose forward calls ``checkpoint``."""
    return linear.name.startswith(f"{region.name}." if region.name else "")


def unseen_recompute(facts: Facts) -> str | None:
    """Name the module whose forward checkpoints layers unseen; None without one."""
    if not recorded(facts, "training.checkpointing"):
        return None
    unseen = [each for each in facts.network.linears if not recorded(each, "checkpointed")]
    for region in facts.training.checkpointing:
        calls = region.form == "called_in_forward" and region.active is not False
        if calls and any(covers(region, linear) for linear in unseen):
            return region.name
    return None


GEMM_EFFICIENCY_BF16 = 0.88
"""Share of the peak rate inside the tiles of a BF16 matmul at the full clock. Fitted, with the tile's part of
`BACK_TO_BACK`, to 1290 swept matmuls: one H200, torch 2.11, November 2026,
research/benchmarks/measured/h200_sweep.json.gz."""

GEMM_EFFICIENCY_FP8 = 0.86
"""The same for FP8, e4m3 x e4m3 and e5m2 x e4m3 alike."""


class NoNumbers(Exception):
    """The cost model has no numbers for a part of a step; the message says for which."""


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

PADDED = 64
"""Elements to pad a 16-bit side to: 128 bytes, as NVIDIA asks on an A100; 8 are enough elsewhere."""


def padded_side(side: int) -> int:
    """Return what to pad a side of a 16-bit matmul to."""
    return side if side % MULTIPLE == 0 else -(-side // PADDED) * PADDED


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
) -> float:
    """Model one (M, K) x (K, N) matmul with BF16 output: launch, compute or memory.

    It is one of ``groups`` in the same kernel. Raises `NoNumbers` without FP8 tensor cores.
    """
    peak = gpu.fp8_tflops if fp8 else gpu.bf16_tflops
    if peak is None:
        raise NoNumbers(f"{gpu.name} has no FP8 tensor cores")
    peak *= GEMM_EFFICIENCY_FP8 if fp8 else GEMM_EFFICIENCY_BF16
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


def matmuls_ms(
    m: int, k: int, n: int, gpu: GpuSpec, recipe: Recipe | None, *, groups: int = 1
) -> tuple[float, float, float]:
    """Model output, input gradient and weight gradient of one Linear, in BF16 without a recipe.

    Some recipes leave the weight gradient in BF16. Rows of activations are as long as their features, so the
    number of tokens costs no alignment. Raises `NoNumbers` for a recipe that it does not know on this GPU.
    """
    if groups > 1 and gpu.compute_capability.startswith("10."):
        return _grouped_on_blackwell(m, k, n, gpu, recipe)
    m = ceil(m / MULTIPLE) * MULTIPLE
    last = None if recipe and recipe.weight_gradient_in_16_bits else recipe
    return (
        scaled_gemm_ms(m, k, n, gpu, recipe, groups=groups),
        scaled_gemm_ms(m, n, k, gpu, recipe, groups=groups),
        scaled_gemm_ms(k, m, n, gpu, last, groups=groups),
    )


BLACKWELL_GROUPED_BF16 = 0.36
"""Share of the BF16 peak of a B200 that `torch._grouped_mm` reaches: 0.34 to 0.42, seven shapes of 128,000
rows and 2 to 8 experts. Source: torchao 0.14, ``prototype/moe_training/README.md``."""

BLACKWELL_GROUPED_MXFP8 = (0.465, 0.465, 0.354)
"""Share of the FP8 peak that the grouped matmuls of MXFP8 reach, for output, input and weight gradient:
1.838, 1.838 and 2.412 ms for 131,072 rows and 8 experts of 7168 x 2048. Source: the same file in 0.15, a
B200."""


def _grouped_on_blackwell(
    m: int, k: int, n: int, gpu: GpuSpec, recipe: Recipe | None
) -> tuple[float, float, float]:
    """Model the matmuls of one expert by published rates."""
    one = 2.0 * m * k * n / 1e9
    if recipe is None:
        each = one / (gpu.bf16_tflops * BLACKWELL_GROUPED_BF16)
        return each, each, each
    if recipe.name != "mxfp8" or not gpu.fp8_tflops:
        raise no_matmuls(recipe, gpu)
    output, of_input, of_weight = (one / (gpu.fp8_tflops * share) for share in BLACKWELL_GROUPED_MXFP8)
    return output, of_input, of_weight


def no_matmuls(recipe: Recipe, gpu: GpuSpec) -> NoNumbers:
    return NoNumbers(f"the cost model has no matmuls of the recipe {recipe.name} on {gpu.name}")


def scaled_gemm_ms(
    m: int, k: int, n: int, gpu: GpuSpec, recipe: Recipe | None, *, pace: Pace = IN_A_STEP, groups: int = 1
) -> float:
    """Model one matmul of a recipe, or in BF16. Raises `NoNumbers` without tensor cores for it."""
    if recipe and recipe.in_fp4 and gpu.fp4_tflops is None:
        raise no_matmuls(recipe, gpu)
    ms = gemm_ms(m, k, n, gpu, fp8=recipe is not None, pace=pace, groups=groups)
    if recipe is None:
        return ms
    faster = gpu.fp4_tflops / gpu.fp8_tflops if recipe.in_fp4 and gpu.fp4_tflops and gpu.fp8_tflops else 1.0
    return ms * recipe.matmul_times / faster


def large_gemm_speedup(gpu: GpuSpec) -> float:
    """Return a large FP8 matmul's speedup over BF16; 1 without FP8 tensor cores."""
    return gemm_ms(*LARGE, gpu, fp8=False) / gemm_ms(*LARGE, gpu, fp8=gpu.fp8_tflops is not None)


def amdahl(share: float, speedup: float) -> float:
    """Compute the speedup of a whole of which ``share`` is ``speedup`` times as fast.

    60% at 1.5x gives 1.25x, 80% gives 1.36x. Source: Amdahl, AFIPS 1967.
    """
    return 1.0 / (1.0 - share + share / speedup)
