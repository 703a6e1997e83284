"""Datasheets of NVIDIA's GPUs, and the choice of the one whose costs are modelled.

AMD's have none: the cost model's efficiencies were never measured on one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from fp8doctor.errors import UserError

if TYPE_CHECKING:
    from fp8doctor.facts import Facts


class GpuSpec(NamedTuple):
    """Datasheet numbers of one GPU, dense (without sparsity), with FP32 accumulation."""

    name: str
    product: str
    """Regular expression for the NVML name without the vendor."""
    compute_capability: str
    bf16_tflops: float
    fp8_tflops: float | None
    """None below compute capability 8.9: no FP8 tensor cores."""
    memory_tb_s: float
    memory_gib: float
    link_gb_s: float
    """To the other GPUs of its host, one way: NVLink, else PCIe."""
    multiprocessors: int
    source: str
    block_scaled_fp8_tflops: float | None = None
    """For FP8 with one scale per 32 elements (MXFP8), if the rate differs."""
    fp4_tflops: float | None = None
    """For NVFP4; None if its training does not run there."""
    link_gpus: int = 8
    """GPUs that these links join."""

    @property
    def capability(self) -> tuple[int, ...]:
        return tuple(map(int, self.compute_capability.split(".")))


# fmt: off
GPUS = (
    GpuSpec("A100", r"A100-SXM4?-80GB", "8.0", 312.0, None, 2.039, 80, 300, 108,
            "NVIDIA A100 80GB SXM datasheet, 2021"),
    GpuSpec("A10040GB", r"A100-SXM4?-40GB", "8.0", 312.0, None, 1.555, 40, 300, 108,
            "NVIDIA A100 architecture whitepaper"),
    GpuSpec("L4", r"L4", "8.9", 121.0, 242.5, 0.300, 24, 32, 58, "NVIDIA L4 datasheet"),
    GpuSpec("L40", r"L40", "8.9", 181.05, 362.0, 0.864, 48, 32, 142, "NVIDIA L40 datasheet"),
    GpuSpec("L40S", r"L40S", "8.9", 362.05, 733.0, 0.864, 48, 32, 142, "NVIDIA L40S datasheet, 2023"),
    GpuSpec("RTX4090", r"GeForce RTX 4090", "8.9", 165.2, 330.3, 1.008, 24, 32, 128,
            "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    GpuSpec("RTX6000ADA", r"RTX 6000 Ada Generation", "8.9", 364.25, 728.5, 0.96, 48, 32, 142,
            "NVIDIA RTX 6000 Ada datasheet"),
    GpuSpec("H100", r"H100( 80GB HBM3)?", "9.0", 989.4, 1978.9, 3.35, 80, 450, 132,
            "NVIDIA H100 SXM datasheet, 2023"),
    GpuSpec("H100PCIE", r"H100 PCIe", "9.0", 756.5, 1513.0, 2.0, 80, 64, 114, "NVIDIA H100 PCIe datasheet"),
    GpuSpec("H100NVL", r"H100 NVL", "9.0", 835.5, 1670.5, 3.9, 94, 300, 132, "NVIDIA H100 NVL datasheet"),
    GpuSpec("H200", r"H200", "9.0", 989.4, 1978.9, 4.8, 141, 450, 132, "NVIDIA H200 SXM datasheet, 2024"),
    GpuSpec("H200NVL", r"H200 NVL", "9.0", 835.5, 1670.5, 4.8, 141, 450, 132,
            "NVIDIA H200 NVL datasheet, 2024"),
    GpuSpec("H20", r"H20", "9.0", 148.0, 296.0, 4.0, 96, 450, 78,
            "NVIDIA H20 datasheet, as resellers quote it"),
    GpuSpec("B200", r"B200", "10.0", 2250.0, 4500.0, 7.7, 180, 900, 148,
            "NVIDIA HGX B200 datasheet", fp4_tflops=9000.0),
    GpuSpec("GB200", r"GB200", "10.0", 2500.0, 5000.0, 8.0, 186, 900, 152,
            "NVIDIA GB200 NVL72 datasheet, divided by 72 GPUs", fp4_tflops=10000.0, link_gpus=72),
    GpuSpec("B300", r"B300( SXM6 AC)?", "10.3", 2250.0, 4500.0, 7.7, 270, 900, 148,
            "NVIDIA HGX B300 datasheet", fp4_tflops=13500.0),
    GpuSpec("GB300", r"GB300", "10.3", 2500.0, 5000.0, 8.0, 279, 900, 152,
            "NVIDIA GB300 NVL72 datasheet, divided by 72 GPUs", fp4_tflops=15000.0, link_gpus=72),
    GpuSpec("RTX5090", r"GeForce RTX 5090", "12.0", 209.5, 419.0, 1.792, 32, 64, 170,
            "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A", block_scaled_fp8_tflops=838.0),
    GpuSpec("RTXPRO6000", r"RTX PRO 6000 Blackwell Workstation Edition", "12.0",
            503.8, 1007.6, 1.792, 96, 64, 188, "NVIDIA RTX PRO Blackwell GPU architecture whitepaper"),
)
# fmt: on
"""One row per board: NVL, PCIe, laptop and other memory sizes are separate.

A GPU without a row has no datasheet here.

Memory is the datasheets' GB, which NVML shows as about as many GiB. PCIe is x16: 32 GB/s in generation 4,
64 in 5. The NVLink of H100 NVL joins pairs, that of H200 NVL four GPUs.

Multiprocessors that the datasheets leave out: A100 108 (NVIDIA A100 architecture whitepaper); H100, its NVL
and both H200 132, H100 PCIe 114 (NVIDIA H100 architecture whitepaper); B200 and B300 148
(``cudaDeviceProp.multiProcessorCount``); GB200 and GB300 152 (comments in flashinfer); H20 78
(mirage-project/mirage#354); L4, L40, L40S, RTX 6000 Ada and RTX PRO 6000 from their 7424, 18176 and 24064
CUDA cores, 128 each.

Numbers of one source: the rates of GB200, for which torchao 0.18 and others take those of B200, and its 152
multiprocessors; all of H20. B300 has a bus of 7680 bits like B200, so 7.7 TB/s where the datasheet says "up
to 8". Professional boards keep the full rate with FP32 accumulation, for plain and block-scaled FP8.

Matmuls sustain as much of these rates as the H200's do: 288 of a 5B model, published for H200 NVL and B300,
took 768 and 314 ms in BF16, 403 and 163 in FP8; modelled are 790, 300, 415 and 162 (published.md).

Block-scaled FP8 on a Blackwell GeForce has the datasheet's rate for FP16 accumulation: FP32 accumulation
halves plain FP8, but not block-scaled FP8. Measured: 202 compared with 102 TFLOP/s on an RTX 5060 Ti
(flashinfer-ai/flashinfer#3628), and a matmul 1.55x as fast on an RTX 5090 (triton-lang/triton#11320).
"""

AMD = ("AMD", "INSTINCT", "MI1", "MI2", "MI3", "MI4")
"""How the short names of AMD's GPUs begin."""

LONGEST_NAME = 40
"""Longest name to suggest alternatives for, in characters."""

DEFAULT_GPU = "H100"
"""Modelled if there is no GPU and none is assumed."""

MEMORY_EFFICIENCY = 0.90
"""Share of the bandwidth that a copy reaches: 4.3 of 4.8 TB/s on one H200.

torchao's roofline uses 0.92.
"""


def _datasheet(name: str) -> GpuSpec | None:
    wanted = _bare(name)
    for spec in GPUS:
        product = re.sub(r"[ -]|GeForce|SXM4\?", "", spec.product)
        if wanted in _names(spec) or re.fullmatch(product, wanted, re.IGNORECASE):
            return spec
    return None


@lru_cache(maxsize=256)
def gpu_spec(name: str) -> GpuSpec:
    """Find the datasheet of a GPU by its short or full name, in any case.

    Raises `UserError` that names similar and all known GPUs.
    """
    if spec := _datasheet(name):
        return spec
    wanted = _bare(name)
    if wanted.startswith(AMD):
        raise UserError(f"fp8doctor has no estimates for AMD GPUs such as {name}: no matmul was timed on one")
    from difflib import get_close_matches

    names = {each: spec.name for spec in GPUS for each in _names(spec)}
    near = dict.fromkeys(names[each] for each in get_close_matches(wanted[:LONGEST_NAME], names))
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise UserError(
        f"no datasheet for the GPU {name[:100]!r}{meant} known are {', '.join(spec.name for spec in GPUS)}"
    )


def gpu_specs(names: str | Sequence[str]) -> list[GpuSpec]:
    """Find the datasheets of GPUs, each once; a string separates them by commas. Raises `UserError`."""
    named = names.split(",") if isinstance(names, str) else names
    if not (found := dict.fromkeys(gpu_spec(each) for each in named if each.strip())):
        raise UserError("--gpu names no GPU")
    return list(found)


def _names(spec: GpuSpec) -> tuple[str, ...]:
    """List the short names of a GPU: H100 and H10080GB, RTX4090 and 4090."""
    memory = ("", "80GB") if spec.name in ("A100", "H100") else ("",)
    return (*(spec.name + each for each in memory), spec.name.removeprefix("RTX"))


def _bare(name: str) -> str:
    """Normalize a GPU's name: capitals, no blanks, dashes, vendor or default board.

    H100 for NVIDIA H100 SXM5.
    """
    bare = re.sub(r"[\W_]", "", name.partition(",")[0].upper())
    return re.sub(r"^NVIDIA|GEFORCE|(?<=[0-9])SXM[0-9]?(?=$|[0-9]{2}GB)", "", bare)


def modelled_gpu(facts: Facts) -> GpuSpec | None:
    """Choose the GPU whose costs are modelled.

    That is the assumed GPU, else the first visible one that has a datasheet, else (if none is visible) H100.
    None if no visible GPU has a datasheet: boards of one name differ by a factor, so another board's numbers
    would be wrong. None, too, for an assumed GPU that is not known.
    """
    gpus = facts.get("gpus", ())
    visible = [name for gpu in gpus if (name := gpu.get("name")) and gpu.get("visible") is not False]
    assumed = facts.get("assumed_gpu")
    return next(filter(None, map(_datasheet, [assumed] if assumed else visible or [DEFAULT_GPU])), None)


def memory_ms(bytes_moved: float, gpu: GpuSpec) -> float:
    """Divide bytes by the bandwidth that the GPU's memory reaches in practice."""
    return bytes_moved / (gpu.memory_tb_s * MEMORY_EFFICIENCY * 1e9)
