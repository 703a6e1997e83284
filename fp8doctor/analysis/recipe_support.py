"""Recipes that GPU, CUDA and the installed versions support."""

from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from fp8doctor import recipes
from fp8doctor.analysis.fp8_request import BACKENDS
from fp8doctor.facts import Facts, Gpu, Linear, recorded
from fp8doctor.gpus import gpu_spec
from fp8doctor.recipes import (
    FIRST_WITH_FP8,
    RECIPES,
    STACKS,
    TRANSFORMER_ENGINE,
    Recipe,
    VersionNumbers,
    default_recipe,
    of_stack,
    recipe_of,
    stack_of,
)

AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx120", "gfx125")
"""Beginnings of the AMD architectures with FP8 matrix cores: CDNA 3 (fnuz types), CDNA 4, RDNA 4, gfx1250.
Source: ``scaled_mm_arch_allowed`` of torch main, which takes gfx1250 from ROCm 7.14 on."""


def has_fp8(gpu: Gpu) -> bool:
    if gpu.vendor == "amd":
        return (gpu.architecture or "").startswith(AMD_WITH_FP8)
    return capability(gpu) >= FIRST_WITH_FP8


def capability(gpu: Gpu) -> VersionNumbers:
    return numbers(gpu.compute_capability or "0.0")


def visible_gpus(facts: Facts) -> list[Gpu] | None:
    """List the GPUs that this process may use; None if they could not be read."""
    if not recorded(facts, "gpus"):
        return None
    return [gpu for gpu in facts.gpus if gpu.get("visible", True)]


def assumed_gpus(facts: Facts) -> list[Gpu]:
    """Return the GPU that --assume-gpu names, for a job that sees none."""
    if not facts.get("assumed_gpu"):
        return []
    spec = gpu_spec(facts.assumed_gpu)
    return [Gpu(name=spec.name, vendor="nvidia", compute_capability=spec.compute_capability)]


def gpus_of(facts: Facts) -> list[Gpu]:
    return [gpu for gpu in facts.gpus if gpu.visible] or assumed_gpus(facts)


BLOCKS = ("transformer_engine", "blockwise")

BLOCKS_ANYWHERE = Version("2.9")
"""First Transformer Engine that runs them on more than Hopper: its ``check_fp8_block_scaling_support``."""


def unmet(wanted: Recipe, gpu: Gpu, facts: Facts) -> str | None:
    """Explain why a recipe does not run; None if it seems to, as on every AMD GPU with FP8 cores."""
    if gpu.vendor == "amd":
        return None
    have, cuda = capability(gpu), facts.software.cuda
    te = installed(facts, "transformer_engine") if (wanted.stack, wanted.name) == BLOCKS else None
    if te and te < BLOCKS_ANYWHERE:
        wanted = replace(wanted, below=(10, 0))
    if not recipes.runs_on(wanted, have):
        below = f" and below {dotted(wanted.below)}" if wanted.below else ""
        limit = f"{dotted(wanted.first)} or higher{below}"
        return f"it needs compute capability {limit}, and {gpu.name} has {gpu.compute_capability}"
    on_ada = STACKS[wanted.stack].cuda_on_ada if wanted.stack in STACKS and have == FIRST_WITH_FP8 else (0,)
    least = max(wanted.cuda, on_ada)
    if cuda and numbers(cuda) < least:
        return f"it needs CUDA {dotted(least)}, and torch was built with {cuda}"
    if have == FIRST_WITH_FP8 and (torch := facts.software.torch) and numbers(torch) < wanted.torch_on_ada:
        return f"it needs torch {dotted(wanted.torch_on_ada)} on {gpu.name}, and this is {torch}"
    return None


def numbers(text: str) -> VersionNumbers:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def dotted(version: VersionNumbers) -> str:
    return ".".join(map(str, version))


def runs_on(facts: Facts, recipe: Recipe) -> list[Gpu]:
    """List the visible GPUs that can run a recipe, with this CUDA; AMD's no block scaling, which few have."""
    return [
        gpu
        for gpu in facts.gpus
        if gpu.visible
        and has_fp8(gpu)
        and not (gpu.vendor == "amd" and recipe.granularity == "block")
        and unmet(recipe, gpu, facts) is None
    ]


def may_run(recipe: Recipe, facts: Facts) -> bool:
    """Return whether a visible GPU runs a recipe; without one, whether it needs FP8 alone."""
    if any(gpu.visible for gpu in facts.gpus):
        return bool(runs_on(facts, recipe))
    return recipe.first == FIRST_WITH_FP8


def usable_recipes(facts: Facts) -> dict[str, list[Recipe]]:
    """List, by stack, the recipes that an installed library has and a visible GPU can run."""
    found: dict[str, list[Recipe]] = {}
    for recipe in RECIPES.values():
        has_it = recipe.treatment and at_least(facts, recipe.stack, Version(recipe.since))
        if has_it and not _fails_to_import(facts, recipe.stack) and runs_on(facts, recipe):
            found.setdefault(recipe.stack, []).append(recipe)
    return found


def _fails_to_import(facts: Facts, stack: str) -> bool:
    """Return whether the import failed in a try, or will for want of a newer cuDNN."""
    tried = facts.get("environment.backend_imports", {})
    errors = [error for backend, error in tried.items() if BACKENDS.get(backend) == stack]
    if errors:
        return errors[0] is not None
    floor = stack == TRANSFORMER_ENGINE.name and at_least(facts, stack, TE_WITH_CUDNN_FLOOR)
    return floor and loads_newest_te(facts) is False


def own_recipes(facts: Facts, opened: bool) -> set[str]:
    """List the recipes that the layers ran, else the default of an open autocast."""
    layers = [each for each in facts.network.fp8 if each.stack == TRANSFORMER_ENGINE.name]
    ran = {recipe for each in layers if (recipe := each.get("recipe"))}
    have = max((capability(gpu) for gpu in facts.gpus if gpu.visible), default=(0, 0))
    return ran or ({default_recipe(TRANSFORMER_ENGINE, have) or ""} if layers and opened else set())


def multiple_of(linear: Linear) -> int:
    """Return the multiple that a layer's sides need, by its recipe; by its class if that was not recorded."""
    words = f"{linear.recipe or ''} {linear.kind.rpartition('.')[2]} {linear.weight_class or ''}".lower()
    marked = (each for each in of_stack(linear.stack) or of_stack("torchao") if each.mark)
    return next((each for each in marked if each.mark in words), recipe_of(linear)).multiple


def unaligned(linear: Linear) -> bool:
    multiple = multiple_of(linear)
    return linear.in_features % multiple != 0 or linear.out_features % multiple != 0


def tokens_divisor(linear: Linear) -> int:
    """Return the multiple that this FP8 layer's tokens need; 1 without a need."""
    recipe, frozen = recipe_of(linear), stack_of(linear).forward_tokens
    if frozen is not None and not linear.requires_grad and not recipe.whole_blocks:
        return frozen
    if recipe.pads_tokens or linear.features.get("pad_inner_dim"):
        return 1
    return multiple_of(linear)


TE_WITH_CUDNN_FLOOR, CUDNN_FLOOR = Version("2.20"), Version("9.12")
"""First Transformer Engine that refuses an older cuDNN at import, and the first cuDNN that it takes. torch
2.8 to 2.10 pin 9.10.2.21. Source: ``transformer_engine/common/__init__.py`` of 2.19.0 and 2.20.2."""

TE_BESIDE_ANY_CUBLAS = Version("2.17")
"""First Transformer Engine after those that miss a symbol in the cuBLAS of torch 2.11 (2.13.0 to 2.16.1).
Source: symbols read in the released libraries."""


def loads_newest_te(facts: Facts) -> bool | None:
    """Return whether the cuDNN of torch is new enough for it; None if that is unknown."""
    cudnn = parsed(facts.get("software.cudnn"))
    return None if cudnn is None else cudnn >= CUDNN_FLOOR


def transformer_engine_line(facts: Facts, since: Version = TE_BESIDE_ANY_CUBLAS) -> str:
    """Write the pip line for the newest Transformer Engine that this cuDNN can load.

    If none since this release is, a newer cuDNN comes last: torch pins its own, which pip would put back.
    """
    bounds, after = f">={since}", ""
    if not loads_newest_te(facts):
        after = f"   # {TE_WITH_CUDNN_FLOOR} and newer need cuDNN {CUDNN_FLOOR}"
        if since < TE_WITH_CUDNN_FLOOR:
            bounds += f",<{TE_WITH_CUDNN_FLOOR}"
        else:
            after += f"\n{cudnn_line(facts)}"
    return f'pip install --upgrade --no-build-isolation "transformer-engine[pytorch]{bounds}"{after}'


def cudnn_line(facts: Facts) -> str:
    """Write the pip line for a cuDNN that the newest Transformer Engine takes, for torch's CUDA."""
    cuda = (facts.get("software.cuda") or "12").partition(".")[0]
    return f'pip install "nvidia-cudnn-cu{cuda}>={CUDNN_FLOOR}"'


def parsed(version: str | None) -> Version | None:
    try:
        return Version(version or "")
    except InvalidVersion:
        return None


def installed(facts: Facts, package: str) -> Version | None:
    found = facts.packages().get(package)
    return parsed(found.get("version")) if found is not None else None


def at_least(facts: Facts, package: str, version: Version) -> bool:
    """Return whether a package is this version or newer, or of an unknown one."""
    return package in facts.software.packages and (installed(facts, package) or version) >= version


def reads_backend(facts: Facts) -> bool:
    """Return whether accelerate's ``Accelerator`` and ``prepare`` read ACCELERATE_FP8_BACKEND."""
    return at_least(facts, "accelerate", Version("1.9.0"))
