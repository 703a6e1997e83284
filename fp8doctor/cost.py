"""What FP8 should cost and give, from the datasheet of a GPU and a handful of measured efficiencies.

A roofline per GEMM, the bytes that the casts move, and Amdahl's law. Good enough to rank treatments; a number that
comes from here carries the basis ``modelled`` and the name of the GPU. Lengths are counts of elements, times ms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Linear, recorded
from fp8doctor.finding import Saving


@dataclass(frozen=True)
class GpuSpec:
    """Datasheet numbers of one GPU, dense (without sparsity), with FP32 accumulation."""

    name: str
    compute_capability: str
    bf16_tflops: float
    fp8_tflops: float | None
    """None below compute capability 8.9: no FP8 tensor cores."""
    memory_tb_s: float
    source: str


GPUS = (
    GpuSpec("A100", "8.0", 312.0, None, 2.039, "NVIDIA A100 80GB SXM datasheet, 2021"),
    GpuSpec("L40S", "8.9", 362.05, 733.0, 0.864, "NVIDIA L40S datasheet, 2023"),
    GpuSpec("RTX4090", "8.9", 165.2, 330.3, 1.008, "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"),
    GpuSpec("H100", "9.0", 989.4, 1978.9, 3.35, "NVIDIA H100 SXM datasheet, 2023"),
    GpuSpec("H200", "9.0", 989.4, 1978.9, 4.8, "NVIDIA H200 SXM datasheet, 2024"),
    GpuSpec("B200", "10.0", 2250.0, 4500.0, 8.0, "NVIDIA HGX B200 datasheet, 2024"),
    GpuSpec("RTX5090", "12.0", 209.5, 419.0, 1.792, "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendix A"),
)

DEFAULT_GPU = "H100"
"""Modelled when there is no GPU and none is assumed."""

GEMM_EFFICIENCY_BF16 = 0.80
"""Share of the peak a large BF16 GEMM reaches: 785-798 of 989 TFLOP/s at (16384, 4096, 16384) and 8192 cubed, one H200,
torch 2.11, November 2026."""

GEMM_EFFICIENCY_FP8 = 0.755
"""Share of the peak a large FP8 GEMM reaches: 1480-1505 of 1979 TFLOP/s at (16384, 4096, 16384), same H200."""

MEMORY_EFFICIENCY = 0.90
"""Share of the bandwidth a copy reaches: 4.3 of 4.8 TB/s, same H200; torchao's roofline takes 0.92."""

KERNEL_LAUNCH_MS = 0.002
"""Shortest time of a kernel that waits for its launch. Source: torchao ``roofline_utils.KERNEL_LAUNCH_OVERHEAD_SEC``."""

EAGER_CAST_BYTES = 63.0
"""Bytes of effective memory traffic per element for one uncompiled torchao cast, fitted to the casts of two decoders on
one H200 (torch 2.11, torchao 0.18): 273.6 ms at width 1024 gives 61, 117.1 ms at width 4096 gives 65."""

EAGER_CASTS = 2
"""Times each of input, weight and output gradient is cast in one step: once for each layout."""

EAGER_HOST_MS = 1.65
"""Host time one uncompiled Float8Linear adds to a step, ms: (113.5 - 22.7) / 55 at 256 tokens, where the host is the
limit; one H200 machine, accelerate 1.15, torchao 0.18."""

COMPILED_CAST_BYTES = {"activation": 6.0, "weight": 8.0}
"""Bytes per element of a compiled tensorwise cast: amax reads 2, the cast reads 2 and writes two FP8 copies of 1;
weights are cast again in the backward. Source: torchao ``roofline_utils``."""

COMPILED_CAST_KERNELS = 9
"""Extra kernels per compiled Float8Linear and step, counted on one H200 (8.7 and 9.2)."""

UNCERTAINTY = 0.25
"""Half-width of the interval around a modelled saving. Source: torchao's roofline against measured rows, about 25 %."""


def gpu_spec(name: str) -> GpuSpec:
    """The datasheet of a GPU by its short name, in any case. Raises `UserError` naming the known ones."""
    wanted = name.upper().replace(" ", "").replace("-", "")
    for spec in GPUS:
        if spec.name == wanted:
            return spec
    raise UserError(f"no datasheet for the GPU {name!r}; known are {', '.join(spec.name for spec in GPUS)}")


def modelled_gpu(facts: Facts) -> GpuSpec:
    """The GPU whose costs are modelled: the assumed one, else the first visible one with a datasheet, else H100 SXM."""
    if recorded(facts.assumed_gpu) and facts.assumed_gpu:
        return gpu_spec(facts.assumed_gpu)
    for gpu in facts.gpus if recorded(facts.gpus) else ():
        product = gpu.name.upper().replace(" ", "") if recorded(gpu.name) else ""
        for spec in GPUS:
            if spec.name in product and gpu.visible is not False:
                return spec
    return gpu_spec(DEFAULT_GPU)


def gemm_ms(m: int, k: int, n: int, gpu: GpuSpec, *, fp8: bool) -> float | None:
    """Time of one (M, K) x (K, N) GEMM with BF16 output: the slower of computing, moving the operands, and a launch.

    None where the GPU has no FP8 tensor cores and ``fp8`` is asked for.
    """
    if fp8 and gpu.fp8_tflops is None:
        return None
    peak = gpu.fp8_tflops * GEMM_EFFICIENCY_FP8 if fp8 and gpu.fp8_tflops else gpu.bf16_tflops * GEMM_EFFICIENCY_BF16
    operand_bytes = 1 if fp8 else 2
    compute = 2.0 * m * k * n / (peak * 1e9)
    return max(compute, memory_ms(operand_bytes * (m * k + k * n) + 2 * m * n, gpu), KERNEL_LAUNCH_MS)


def step_gemms_ms(m: int, k: int, n: int, gpu: GpuSpec, *, fp8: bool, weight_gradient: bool = True) -> float | None:
    """Time of the GEMMs of one Linear in one step: output, input gradient and, if trained, weight gradient."""
    shapes = [(m, k, n), (m, n, k)] + ([(k, m, n)] if weight_gradient else [])
    times = [gemm_ms(*shape, gpu, fp8=fp8) for shape in shapes]
    return None if None in times else sum(time for time in times if time is not None)


def casts_ms(m: int, k: int, n: int, gpu: GpuSpec, *, compiled: bool) -> float:
    """Time torchao's tensorwise casts of one Linear take in one step: input (M, K), weight (K, N), gradient (M, N)."""
    if not compiled:
        return memory_ms(EAGER_CASTS * EAGER_CAST_BYTES * (m * k + k * n + m * n), gpu)
    activations = memory_ms(COMPILED_CAST_BYTES["activation"] * (m * k + m * n), gpu)
    return max(activations + memory_ms(COMPILED_CAST_BYTES["weight"] * k * n, gpu), COMPILED_CAST_KERNELS * KERNEL_LAUNCH_MS)


def memory_ms(bytes_moved: float, gpu: GpuSpec) -> float:
    """Time to move so many bytes through the GPU's memory at the bandwidth that is really reached."""
    return bytes_moved / (gpu.memory_tb_s * MEMORY_EFFICIENCY * 1e9)


def amdahl(share: float, speedup: float) -> float:
    """Speedup of the whole when ``share`` of its time (0 to 1) runs ``speedup`` times as fast.

    60 % at 1.5x gives 1.25x, 80 % gives 1.36x. Raises ValueError outside those ranges. Source: Amdahl, AFIPS 1967.
    """
    if not 0.0 <= share <= 1.0 or speedup <= 0.0:
        raise ValueError(f"a share of 0 to 1 and a positive speedup are needed, not {share} and {speedup}")
    return 1.0 / (1.0 - share + share / speedup)


@dataclass(frozen=True)
class Balance:
    """What FP8 costs and gives in one step of these layers, uncompiled, modelled."""

    casts_ms: float
    gemms_saved_ms: float
    gpu: str


def eager_balance(facts: Facts, eager: Iterable[Linear]) -> Balance | None:
    """The eager casts of these layers against what their FP8 GEMMs save; None when it cannot be modelled."""
    gpu, tokens = modelled_gpu(facts), step_tokens(facts)
    if tokens is None or gpu.fp8_tflops is None:
        return None
    casts = saved = 0.0
    for linear in eager:
        count = linear.gemms if recorded(linear.gemms) else 1
        trained = linear.requires_grad is not False
        shape = (tokens, linear.in_features, linear.out_features)
        bf16, fp8 = (step_gemms_ms(*shape, gpu, fp8=in_fp8, weight_gradient=trained) or 0.0 for in_fp8 in (False, True))
        casts += count * casts_ms(*shape, gpu, compiled=False)
        saved += count * (bf16 - fp8)
    return Balance(casts, saved, gpu.name)


def step_tokens(facts: Facts) -> int | None:
    """Rows of the GEMMs in one micro-batch; None when that is not known."""
    tokens = facts.workload.tokens if recorded(facts.workload) else None
    return tokens if recorded(tokens) else None


def eager_cast_saving(facts: Facts, eager: Iterable[Linear]) -> Saving | None:
    """What compiling the casts of these layers saves of one step; None when the tokens are unknown or FP8 cannot run.

    The uncompiled casts keep the GPU busy, or, with few tokens, the host: the longer of the two counts.
    """
    gpu = modelled_gpu(facts)
    tokens = step_tokens(facts)
    if tokens is None or gpu.fp8_tflops is None:
        return None
    shapes = [(tokens, linear.in_features, linear.out_features) for linear in eager for _ in range(linear.gemms if recorded(linear.gemms) else 1)]
    busy = sum(casts_ms(*shape, gpu, compiled=False) for shape in shapes)
    compiled = sum(casts_ms(*shape, gpu, compiled=True) for shape in shapes)
    accumulate = facts.workload.accumulate if recorded(facts.workload.accumulate) else 1
    saved = (max(busy, EAGER_HOST_MS * len(shapes)) - compiled) * accumulate
    return Saving(low=saved * (1 - UNCERTAINTY), high=saved * (1 + UNCERTAINTY), basis="modelled", gpu=gpu.name)
