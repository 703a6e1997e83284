"""Datasheets: what a GPU could do at best, and which GPU's costs are modelled."""

from __future__ import annotations

from msgspec import Struct

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, recorded


class GpuSpec(Struct, frozen=True):
    """Datasheet numbers of one GPU, dense (without sparsity), with FP32 accumulation."""

    name: str
    compute_capability: str
    bf16_tflops: float
    fp8_tflops: float | None
    """None below compute capability 8.9: no FP8 tensor cores."""
    memory_tb_s: float
    multiprocessors: int
    source: str


GPUS = (
    GpuSpec("A100", "8.0", 312.0, None, 2.039, 108, "NVIDIA A100 80GB SXM datasheet, 2021"),
    GpuSpec("L40S", "8.9", 362.05, 733.0, 0.864, 142, "NVIDIA L40S datasheet, 2023"),
    GpuSpec(
        "RTX4090", "8.9", 165.2, 330.3, 1.008, 128, "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A"
    ),
    GpuSpec("H100", "9.0", 989.4, 1978.9, 3.35, 132, "NVIDIA H100 SXM datasheet, 2023"),
    GpuSpec("H200", "9.0", 989.4, 1978.9, 4.8, 132, "NVIDIA H200 SXM datasheet, 2024"),
    GpuSpec("B200", "10.0", 2250.0, 4500.0, 8.0, 148, "NVIDIA HGX B200 datasheet, 2024"),
    GpuSpec(
        "RTX5090",
        "12.0",
        209.5,
        419.0,
        1.792,
        170,
        "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendix A",
    ),
)
"""Multiprocessors that the datasheets leave out: A100 108 (NVIDIA A100 architecture whitepaper), H100 and
H200 132 (NVIDIA H100 architecture whitepaper, SXM5), B200 148 (``cudaDeviceProp.multiProcessorCount``); L40S
from its 18176 CUDA cores, 128 each."""

DEFAULT_GPU = "H100"
"""Modelled when there is no GPU and none is assumed."""

MEMORY_EFFICIENCY = 0.90
"""Share of the bandwidth a copy reaches: 4.3 of 4.8 TB/s on one H200; torchao's roofline takes 0.92."""


def gpu_spec(name: str) -> GpuSpec:
    """Find the datasheet of a GPU by its short name, in any case. Raises `UserError` naming the known
    ones."""
    wanted = name.upper().replace(" ", "").replace("-", "")
    for spec in GPUS:
        if spec.name == wanted:
            return spec
    raise UserError(
        f"no datasheet for the GPU {name[:100]!r}; known are {', '.join(spec.name for spec in GPUS)}"
    )


def modelled_gpu(facts: Facts) -> GpuSpec:
    """Choose the GPU whose costs are modelled: as assumed, else the first one visible that is known, else
    H100."""
    if recorded(facts, "assumed_gpu") and facts.assumed_gpu:
        return gpu_spec(facts.assumed_gpu)
    for gpu in facts.gpus if recorded(facts, "gpus") else ():
        if not recorded(gpu, "name") or (recorded(gpu, "visible") and gpu.visible is False):
            continue
        product = gpu.name.upper().replace(" ", "")
        for spec in GPUS:
            if spec.name in product:
                return spec
    return gpu_spec(DEFAULT_GPU)


def modelled_gpu_name(facts: Facts) -> str:
    """Name the GPU whose costs are modelled; as it was given where it has no datasheet."""
    try:
        return modelled_gpu(facts).name
    except UserError:
        return facts.assumed_gpu or "no known GPU"


def memory_ms(bytes_moved: float, gpu: GpuSpec) -> float:
    """Divide so many bytes by the bandwidth that the GPU's memory really reaches."""
    return bytes_moved / (gpu.memory_tb_s * MEMORY_EFFICIENCY * 1e9)
