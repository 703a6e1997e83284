"""Requirements of a recipe: GPU, CUDA, and multiples of a layer's sides."""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.cost import gpu_spec
from fp8doctor.facts import Facts, Gpu, Linear, recorded

FIRST_WITH_FP8 = (8, 9)
"""Ada. Source: ``_scaled_mm_allowed_device`` in torch. Accelerate falls back to fp16 below it, by itself:
``check_cuda_fp8_capability`` in accelerate 1.15."""

FIRST_WITH_BF16 = (8, 0)
"""Ampere. Source: Ampere tuning guide."""


AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx120", "gfx125")
"""Beginnings of the AMD architectures with FP8 matrix cores: CDNA 3 (fnuz types), CDNA 4, RDNA 4, gfx1250.
Source: ``scaled_mm_arch_allowed`` of torch main, which takes gfx1250 from ROCm 7.14 on."""


def has_fp8(gpu: Gpu) -> bool:
    """Whether a GPU has FP8 tensor cores, or matrix cores."""
    if gpu.vendor == "amd":
        return (gpu.architecture or "").startswith(AMD_WITH_FP8)
    return capability(gpu) >= FIRST_WITH_FP8


def capability(gpu: Gpu) -> tuple[int, ...]:
    """Read the compute capability as numbers; 0.0 where there is none."""
    return tuple(int(part) for part in (gpu.compute_capability or "0.0").split(".") if part.isdigit())


def assumed_gpus(facts: Facts) -> list[Gpu]:
    """The GPU that --assume-gpu names, for a job that sees none."""
    if not recorded(facts, "assumed_gpu") or not facts.assumed_gpu:
        return []
    spec = gpu_spec(facts.assumed_gpu)
    return [Gpu(name=spec.name, vendor="nvidia", compute_capability=spec.compute_capability)]


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


STACK = "transformer_engine"


class TeRecipe(NamedTuple):
    """One recipe of ``transformer_engine.common.recipe``."""

    kind: str
    """Name of its class."""
    recipe: str
    """As `Linear.recipe` has it."""
    words: str


TE_RECIPES = {
    "te-delayed": TeRecipe("DelayedScaling", "delayed", "delayed scaling"),
    "te-current": TeRecipe("Float8CurrentScaling", "current", "current scaling"),
    "te-block": TeRecipe("Float8BlockScaling", "blockwise", "block scaling"),
    "te-mxfp8": TeRecipe("MXFP8BlockScaling", "mxfp8", "MXFP8 block scaling"),
}
"""Name of the treatment -> the recipe."""

FIRST_WITH_MXFP8 = (10, 0)
FIRST_WITHOUT_MXFP8 = (12, 0)
"""Compute capabilities from which on, and from which on no more, MXFP8 is the default. Source:
``get_default_fp8_recipe`` in Transformer Engine 2.20, which takes current scaling from the second on."""


def default_recipe(facts: Facts) -> str:
    """Tell which recipe an autocast takes that is given none."""
    have = max((capability(gpu) for gpu in facts.gpus if gpu.visible), default=(0, 0))
    if have >= FIRST_WITHOUT_MXFP8:
        return "current"
    return "mxfp8" if have >= FIRST_WITH_MXFP8 else "delayed"


def own_recipes(facts: Facts, opened: bool) -> set[str]:
    """List the recipes that the layers ran with; the default where none ran and an autocast is to be
    ``opened``."""
    layers = [each for each in facts.network.linears if each.stack == STACK and each.use == "training"]
    ran = {each.recipe for each in layers if recorded(each, "recipe") and each.recipe}
    return ran or ({default_recipe(facts)} if layers and opened else set())


def is_legal(name: str, facts: Facts) -> bool:
    """Whether nothing that is known of the first visible GPU and of CUDA speaks against the recipe of this
    treatment."""
    recipe = TE_RECIPES[name].recipe
    gpu = next((gpu for gpu in facts.gpus if gpu.visible and gpu.vendor == "nvidia"), None)
    return gpu is not None and unmet(STACK, recipe, needs(STACK, recipe), gpu, facts) is None


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
