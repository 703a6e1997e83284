"""A recipe that this GPU or CUDA cannot run

What it finds. The FP8 recipe of your layers, or the one that Accelerate's variables ask for, does not run on
this GPU or with this CUDA.

Why it matters. The first step raises, or its gradients are zero. MXFP8 and NVFP4 need Blackwell (compute
capability 10.x). 128x128 block scaling needs 9.0 and, in Transformer Engine, CUDA 12.9. One scale per row has
failed on 8.9, B200 and 12.0 in some versions.

Transformer Engine's NVFP4 trains on 12.x (RTX 50) from 2.19 on. Before that, its random Hadamard transform
and stochastic rounding, on by default, need 10.0 or 10.3. Up to 2.15 the step raises, and from 2.16 on the
gradients are zero.

Fix. Use a recipe that fits: tensorwise (torchao) and current scaling (Transformer Engine) run wherever FP8
does.

    from torchao.quantization import quantize_
    quantize_(model, MXFP8TrainingOpConfig())  # before: on an H100

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)

When to ignore it. If the job will run on another GPU; name it with `--assume-gpu`. MOD005 covers recipes that
are emulated on purpose.

How it is detected, and limits. fp8doctor compares the recipe with the first visible GPU and torch's CUDA. If
CUDA is in use already, it also runs a tiny `torch._scaled_mm`. AMD: one scale per tensor runs on gfx94x,
gfx95x and gfx120x, MXFP8 only on gfx950, 128x128 blocks nowhere; AMD's Transformer Engine needs gfx94x or
gfx95x.

References. Transformer Engine 2.20 `pytorch/quantization.py`, `nvfp4.rst`; torchao 0.18.
https://github.com/pytorch/pytorch/issues/130359 https://github.com/pytorch/pytorch/issues/192707
https://github.com/pytorch/ao/issues/2904 https://github.com/pytorch/ao/issues/4582
https://github.com/NVIDIA/TransformerEngine/issues/3062 (NVFP4 on 12.0; also #2956, #2968, #3281)
https://github.com/ROCm/TransformerEngine/issues/359 ("gfx94x or gfx95x required for FP8 execution")
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor.analysis.recipe_support import (
    assumed_gpus,
    capability,
    has_fp8,
    installed,
    needs,
    unmet,
    unmet_on_amd,
)
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.diagnosis.treatments import with_recipe
from fp8doctor.facts import NOT_RECORDED, Facts, Gpu, Linear, Package, Unrecorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import RECIPES, Recipe
from fp8doctor.registry import check
from fp8doctor.wording import plural

PLAIN_NVFP4 = Recipe(stack="transformer_engine", name="nvfp4", first=(10, 0))
"""Needs of Transformer Engine's NVFP4 without random Hadamard transform and stochastic rounding."""

NVFP4_ANYWHERE = Version("2.19")
"""First Transformer Engine with stochastic rounding for GPUs without the instruction ``cvt.rs``, and without
their Hadamard kernels elsewhere. Source: #3281 and #3265, both in the branch ``release_v2.19`` and in no
older one; not run on a 12.x."""

MXFP8_VARIABLE = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
"""Makes Accelerate's Transformer Engine backend ask for MXFP8, and raise if it is not available. Source:
accelerate 1.11 to 1.15, ``utils/transformer_engine.py``: "MXFP8 block scaling is not available"."""

YES = ("1", "true", "yes", "y", "t", "on")
"""Values that Accelerate's ``str_to_bool`` reads as true."""

TREATMENTS = {
    "transformer_engine": Treatment(
        name="recipe-that-fits",
        summary="current scaling, which every GPU with FP8 tensor cores runs",
        code="with te.autocast(recipe=Float8CurrentScaling()):\n    output = model(**batch)",
    ),
    "nvfp4": Treatment(
        name="recipe-that-fits",
        summary=f"NVFP4 without Hadamard transform and stochastic rounding, or version {NVFP4_ANYWHERE}",
        code="recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)\n"
        "with te.autocast(recipe=recipe):\n    output = model(**batch)",
    ),
    "accelerate": Treatment(
        name="recipe-that-fits", summary="let Accelerate use delayed scaling", code=f"unset {MXFP8_VARIABLE}"
    ),
}


@check(
    "GPU002",
    "recipe-unsupported",
    area="device",
    severity="error",
    invalidates_model=True,
    explained_by=("GPU001",),
)
def recipe_unsupported(facts: Facts) -> Finding | NotApplicable | None:
    visible = [gpu for gpu in facts.gpus if gpu.visible] or assumed_gpus(facts)
    gpu = visible[0] if visible else None
    if gpu is None:
        return NotApplicable(reason="no GPU is visible")
    if not has_fp8(gpu):
        return NotApplicable(reason="the first visible GPU has no FP8 tensor cores")
    layers = [each for each in facts.network.fp8 if each.recipe and not each.features.get("emulate")]
    wanted = {(linear.stack, linear.recipe or ""): needs_of(linear, facts, gpu) for linear in layers}
    by_variable = not layers and mxfp8_by_variable(facts.environment.variables)
    if by_variable:
        wanted["transformer_engine", "mxfp8"] = RECIPES["transformer_engine", "mxfp8"]
    if not wanted:
        return NotApplicable(reason="no FP8 layer names its recipe")
    reasons = {
        (stack, recipe): reason
        for (stack, recipe), needed in wanted.items()
        if (
            reason := unmet_on_amd(stack, recipe, gpu)
            if gpu.vendor == "amd"
            else unmet(stack, recipe, needed, gpu, facts)
        )
    }
    if not reasons:
        return None
    affected = [linear for linear in layers if (linear.stack, linear.recipe) in reasons]
    (stack, recipe), reason = next(iter(reasons.items()))
    nvfp4 = (stack, recipe) == ("transformer_engine", "nvfp4") and capability(gpu) >= PLAIN_NVFP4.first
    return Finding(
        title=f"{recipe} does not run here: {reason}",
        explanation=". ".join(f"{name} ({owner}): {text}" for (owner, name), text in reasons.items())
        + (". The first step raises, or its gradients are zero." if nvfp4 else ". The first step raises."),
        evidence={
            "recipes": tuple(name for _, name in reasons),
            "layers": len(affected),
            "gpu": gpu.name,
            "compute_capability": gpu.compute_capability,
            "cuda": facts.software.cuda,
            **({"architecture": gpu.architecture} if gpu.vendor == "amd" else {}),
            "asked_by": MXFP8_VARIABLE if by_variable else plural(len(affected), "FP8 layer"),
        },
        breaks="step_raises" if layers and not ran_on_a_gpu(facts) else NOT_RECORDED,
        treatment=TREATMENTS["accelerate" if by_variable else "nvfp4" if nvfp4 else stack]
        if by_variable or (stack == "transformer_engine" and gpu.vendor != "amd")
        else tensorwise(facts),
    )


def tensorwise(facts: Facts) -> Treatment:
    """Convert with torchao's recipe that needs the least."""
    return Treatment(
        name="recipe-that-fits",
        summary="convert with the tensorwise recipe, which every GPU with FP8 tensor cores runs",
        code=with_recipe("tensorwise", facts),
    )


def mxfp8_by_variable(variables: dict[str, str]) -> bool:
    """Whether Accelerate will ask Transformer Engine for MXFP8."""
    return (
        variables.get("ACCELERATE_FP8_BACKEND") == "TE" and variables.get(MXFP8_VARIABLE, "").lower() in YES
    )


def needs_of(linear: Linear, facts: Facts, gpu: Gpu) -> Recipe:
    """Say what a layer's recipe needs with its settings, in the version that is installed."""
    needed = needs(linear.stack, linear.recipe or "")
    if (linear.stack, linear.recipe) != ("transformer_engine", "nvfp4") or gpu.vendor == "amd":
        return needed
    if linear.features.get("disable_rht") and linear.features.get("disable_stochastic_rounding"):
        return PLAIN_NVFP4
    version = installed(facts, "transformer_engine")
    if version is None and needed.below and capability(gpu) >= needed.below:
        raise Unrecorded(Package, "version", "Transformer Engine's version decides whether it trains here")
    return PLAIN_NVFP4 if version and version >= NVFP4_ANYWHERE else needed


def _machine(capability: str) -> Facts:
    gpu = Gpu(name="NVIDIA H100 80GB HBM3", vendor="nvidia", compute_capability=capability, visible=True)
    layer = float8(recipe="mxfp8", features={"emulate": False})
    return example(cuda="13.0", variables={}, gpus=(gpu,), linears=(layer,))


FIRES = _machine("9.0")
SILENT = _machine("10.0")
