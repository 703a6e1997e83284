"""Datasheets of AMD GPUs: peak rates, memory and FP8 formats.

They bound rates and speedups and model no times: the cost model's efficiencies were never measured on an AMD
GPU.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from fp8doctor.facts import Facts


class AmdSpec(Struct, frozen=True):
    """Datasheet numbers of one GPU, dense (without sparsity)."""

    name: str
    product: str
    """Regular expression for ``torch.cuda.get_device_name``."""
    architecture: str
    bf16_tflops: float
    fp8_tflops: float
    memory_gib: float
    formats: Literal["fnuz", "ocp"]
    """FP8 format: ``float8_e4m3fnuz`` (maximum 240) or ``float8_e4m3fn`` (OCP, 448).

    torchao chooses the right one (``Float8TypeConfig`` in 0.18).
    """
    source: str

    @property
    def compute_capability(self) -> str:
        """Empty: only NVIDIA counts them."""
        return ""


TORCH = "AMD's data sheet, as torch 2.13 quotes it in torch/_inductor/analysis/device_info.py"

AMD_GPUS = (
    AmdSpec("MI300A", r"AMD Instinct MI300A", "gfx942", 980.6, 1961.2, 128, "fnuz", TORCH),
    AmdSpec("MI300X", r"AMD Instinct MI300X", "gfx942", 1307.4, 2614.9, 192, "fnuz", TORCH),
    AmdSpec(
        "MI325X",
        r"AMD Instinct MI325X",
        "gfx942",
        1307.4,
        2614.9,
        256,
        "fnuz",
        "AMD's page of the MI325X, for which torchtitan's get_peak_flops takes the MI300X's number",
    ),
    AmdSpec("MI350X", r"AMD Instinct MI350X", "gfx950", 2309.6, 4614.0, 288, "ocp", TORCH),
    AmdSpec(
        "MI355X",
        r"AMD Instinct MI355X",
        "gfx950",
        2500.0,
        5000.0,
        288,
        "ocp",
        "BF16: AMD's page of the MI355X, quoted by torchtitan's get_peak_flops; FP8: AMD at ISSCC 2026",
    ),
)


def visible_amd(facts: Facts) -> AmdSpec | None:
    """Find the datasheet of the first visible AMD GPU; None if another GPU is assumed."""
    if facts.get("assumed_gpu"):
        return None
    gpus = facts.get("gpus", ())
    names = [name for gpu in gpus if (name := gpu.get("name")) and gpu.get("visible") is not False]
    return next((spec for name in names for spec in AMD_GPUS if re.fullmatch(spec.product, name)), None)


def amd_gpu(name: str) -> AmdSpec | None:
    """Find a datasheet by its name, in any case, with or without the vendor's; None if it is not AMD's."""
    bare = re.sub(r"[\W_]", "", name.upper())
    bare = re.sub(r"^(AMD)?(INSTINCT)?|OAM$", "", bare)
    return next((spec for spec in AMD_GPUS if spec.name == bare), None)
