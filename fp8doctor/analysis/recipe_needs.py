"""What a recipe of a stack runs on: compute capability and CUDA."""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.analysis.capability import FIRST_WITH_FP8, capability
from fp8doctor.facts import Facts, Gpu, recorded

Version = tuple[int, ...]


class Needs(NamedTuple):
    """What a recipe of one stack runs on."""

    first: Version
    """Lowest CUDA compute capability."""
    below: Version | None = None
    """First compute capability on which it does not run any more."""
    cuda: Version = (0,)
    """Lowest CUDA version."""


NEEDS = {
    ("transformer_engine", "mxfp8"): Needs((10, 0), below=(12, 0)),
    ("transformer_engine", "blockwise"): Needs((9, 0), cuda=(12, 9)),
    ("transformer_engine", "nvfp4"): Needs((10, 0), below=(11, 0)),
    ("torchao", "mxfp8"): Needs((10, 0), below=(11, 0), cuda=(12, 8)),
    ("torchao", "nvfp4"): Needs((10, 0)),
    ("torchao", "blockwise"): Needs((9, 0)),
}
"""Stack and recipe -> what it needs. Source: ``check_mxfp8_support``, ``check_fp8_block_scaling_support`` and
``check_nvfp4_support`` in Transformer Engine 2.20; torchao 0.18 (``mxfp8/quant.py``,
``blockwise_fp8_training/linear.py``)."""

CUDA_FOR_TE_ON_ADA = (12, 1)
"""CUDA version, and that of cuBLASLt. Source: ``check_fp8_support`` in Transformer Engine 1.0 to 2.20."""


AMD: dict[tuple[str, str], tuple[str, ...]] = {
    ("torchao", "mxfp8"): ("gfx950",),
    ("torchao", "blockwise"): (),
}
"""The same for AMD: beginnings of the architectures on which it runs. Source: torchao 0.18
(``mx_formats/kernels.py`` asks for ``is_MI350``, ``blockwise_fp8_training/linear.py`` for SM90)."""

AMD_FOR_TE = ("gfx94", "gfx95")
"""Where AMD's fork of Transformer Engine runs FP8: "Device arch gfx94x or gfx95x required for FP8 execution"
(2.1.0, ROCm/TransformerEngine#359)."""


def unmet_on_amd(stack: str, recipe: str, gpu: Gpu) -> str | None:
    """Tell why a recipe does not run on a GPU of AMD's; None where nothing speaks against it."""
    wanted = AMD.get((stack, recipe), AMD_FOR_TE if stack == "transformer_engine" else ("gfx",))
    if (gpu.architecture or "").startswith(wanted):
        return None
    if not wanted:
        return "it runs on no GPU of AMD's"
    return f"it needs {' or '.join(wanted)}, and {gpu.name} is {gpu.architecture}"


def needs(stack: str, recipe: str) -> Needs:
    """Look up what a recipe needs; tensor cores for FP8 where nothing else is known of it."""
    return NEEDS.get((stack, recipe), Needs(FIRST_WITH_FP8))


def unmet(stack: str, recipe: str, wanted: Needs, gpu: Gpu, facts: Facts) -> str | None:
    """Tell why a recipe does not run: a need that is not met, else what the try raised. None when nothing
    speaks against it."""
    have, cuda = capability(gpu), facts.software.cuda
    if have < wanted.first or (wanted.below and have >= wanted.below):
        limit = f"{dotted(wanted.first)} or higher" + (
            f" and below {dotted(wanted.below)}" if wanted.below else ""
        )
        return f"it needs compute capability {limit}, and {gpu.name} has {gpu.compute_capability}"
    least = (
        max(wanted.cuda, CUDA_FOR_TE_ON_ADA)
        if stack == "transformer_engine" and have == FIRST_WITH_FP8
        else wanted.cuda
    )
    if cuda and numbers(cuda) < least:
        return f"it needs CUDA {dotted(least)}, and torch was built with {cuda}"
    error = facts.recipe_tries.get(recipe) if stack == "torchao" and recorded(facts, "recipe_tries") else None
    return f"a tiny GEMM raises {error}" if error else None


def numbers(text: str) -> Version:
    """Read a version as numbers."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def dotted(version: Version) -> str:
    """Write a version as text."""
    return ".".join(map(str, version))
