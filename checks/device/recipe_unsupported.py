"""This GPU or CUDA cannot run FP8, or not this recipe

FP8 tensor cores begin with compute capability 8.9 (Ada: L4, L40S, RTX 4090) and 9.0 (Hopper). Ampere has
none (A100, A10, RTX 3090): FP8 raises there or, in Accelerate, becomes fp16. AMD's gfx94x (MI300, fnuz
types), gfx95x (MI350), gfx120x (RX 9000) and gfx125x have FP8 cores, gfx90a and gfx11 none. MXFP8 and NVFP4
need Blackwell (10.x) or gfx950; 128x128 blocks need 9.0 and, in Transformer Engine, CUDA 12.9. NVFP4 trains
on 12.x (RTX 50) from Transformer Engine 2.19 on; before, the step raises or the gradients are zero.

    from torchao.quantization import quantize_
    quantize_(model, MXFP8TrainingOpConfig())  # before: on an H100

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)

Tensorwise (torchao) and current scaling (Transformer Engine) run wherever FP8 does. Without FP8 cores, train
in BF16: `Accelerator(mixed_precision="bf16")`. Ignore it if the job will run on another GPU; name it with
`--assume-gpu`. If nothing asks for FP8, it is information. Recipes that are emulated on purpose: MOD002.
https://docs.nvidia.com/cuda/ada-tuning-guide/
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp
https://github.com/pytorch/ao/issues/2904
https://github.com/NVIDIA/TransformerEngine/issues/3062
"""

from __future__ import annotations

from packaging.version import Version

from fp8doctor import kit
from fp8doctor.kit import NOT_RECORDED, Facts, Finding, Gpu, NotApplicable, Treatment, check, plural
from fp8doctor.recipes import RECIPES, Recipe

PLAIN_NVFP4 = Recipe(stack="transformer_engine", name="nvfp4", first=(10, 0))
"""Needs of Transformer Engine's NVFP4 without random Hadamard transform and stochastic rounding."""

NVFP4_ANYWHERE = Version("2.19")
"""First Transformer Engine with stochastic rounding for GPUs without the instruction ``cvt.rs``, and without
their Hadamard kernels elsewhere. Source: #3281 and #3265; not run on a 12.x."""

MXFP8_VARIABLE = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
"""Makes Accelerate's Transformer Engine backend ask for MXFP8 (1.11 to 1.15), and raise without it."""

YES = ("1", "true", "yes", "y", "t", "on")
"""Values that Accelerate's ``str_to_bool`` reads as true."""

OF_AMD = "Of AMD's GPUs gfx94x, gfx95x, gfx120x and gfx125x have FP8 matrix cores."
OF_NVIDIA = "FP8 tensor cores begin with compute capability 8.9 (Ada) and 9.0 (Hopper); Ampere has none."
FITS = "recipe-that-fits"
TREATMENTS = {
    "transformer_engine": Treatment(
        name=FITS,
        summary="current scaling, which every GPU with FP8 tensor cores runs",
        code="with te.autocast(recipe=Float8CurrentScaling()):\n    output = model(**batch)",
    ),
    "nvfp4": Treatment(
        name=FITS,
        summary=f"NVFP4 without Hadamard transform and stochastic rounding, or version {NVFP4_ANYWHERE}",
        code="recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)\n"
        "with te.autocast(recipe=recipe):\n    output = model(**batch)",
    ),
    "accelerate": Treatment(
        name=FITS, summary="let Accelerate use delayed scaling", code=f"unset {MXFP8_VARIABLE}"
    ),
}


@check("GPU002", "recipe-unsupported", area="device", severity="error", invalidates_model=True)
def recipe_unsupported(facts: Facts) -> Finding | NotApplicable | None:
    gpu = next(iter(visible_gpus(facts)), None)
    if gpu is None or not kit.has_fp8(gpu):
        none = "the first visible GPU has no FP8 tensor cores" if gpu else "no GPU is visible"
        return NotApplicable(reason=none)
    layers = [each for each in facts.network.fp8 if each.recipe and not each.features.get("emulate")]
    wanted = {(each.stack, each.recipe or ""): needs_of(each, facts, gpu) for each in layers}
    variables = facts.environment.variables
    by_variable = not layers and variables.get("ACCELERATE_FP8_BACKEND") == "TE"
    by_variable = by_variable and variables.get(MXFP8_VARIABLE, "").lower() in YES
    if by_variable:
        wanted["transformer_engine", "mxfp8"] = RECIPES["transformer_engine", "mxfp8"]
    if not wanted:
        return NotApplicable(reason="no FP8 layer names its recipe")
    on_amd = gpu.vendor == "amd"
    reasons = {
        (stack, recipe): reason
        for (stack, recipe), needed in wanted.items()
        if (reason := kit.unmet(stack, recipe, needed, gpu, facts))
    }
    if not reasons:
        return None
    affected = sum((linear.stack, linear.recipe) in reasons for linear in layers)
    (stack, recipe), reason = next(iter(reasons.items()))
    nvfp4 = (stack, recipe) == ("transformer_engine", "nvfp4") and kit.capability(gpu) >= PLAIN_NVFP4.first
    row = "accelerate" if by_variable else "nvfp4" if nvfp4 else stack
    tensorwise = Treatment(
        name=FITS,
        summary="convert with the tensorwise recipe, which every GPU with FP8 tensor cores runs",
        code=kit.with_recipe("tensorwise", facts),
    )
    return Finding(
        title=f"{recipe} does not run here: {reason}",
        explanation=". ".join(f"{name} ({owner}): {text}" for (owner, name), text in reasons.items())
        + f". The first step raises{', or its gradients are zero' if nvfp4 else ''}.",
        evidence={
            "recipes": tuple(name for _, name in reasons),
            "layers": affected,
            "gpu": gpu.name,
            "compute_capability": gpu.architecture if on_amd else gpu.compute_capability,
            "cuda": facts.software.cuda,
            "asked_by": MXFP8_VARIABLE if by_variable else plural(affected, "FP8 layer"),
        },
        breaks="step_raises" if layers and not kit.ran_on_a_gpu(facts) else NOT_RECORDED,
        treatment=tensorwise if row not in TREATMENTS or (on_amd and not by_variable) else TREATMENTS[row],
    )


def visible_gpus(facts: Facts) -> list[Gpu]:
    return [gpu for gpu in facts.gpus if gpu.visible] or kit.assumed_gpus(facts)


def needs_of(linear: kit.Linear, facts: Facts, gpu: Gpu) -> Recipe:
    """Say what a layer's recipe needs with its settings, in the version that is installed."""
    needed = kit.needs(linear.stack, linear.recipe or "")
    if (linear.stack, linear.recipe) != ("transformer_engine", "nvfp4") or gpu.vendor == "amd":
        return needed
    if linear.features.get("disable_rht") and linear.features.get("disable_stochastic_rounding"):
        return PLAIN_NVFP4
    version = kit.installed(facts, "transformer_engine")
    if version is None and needed.below and kit.capability(gpu) >= needed.below:
        why = "Transformer Engine's version decides whether it trains here"
        raise kit.Unrecorded(kit.Package, "version", why)
    return PLAIN_NVFP4 if version and version >= NVFP4_ANYWHERE else needed


@check("GPU002", "no-fp8-tensor-cores", area="device", severity="error", invalidates_model=True, was="GPU001")
def no_fp8_tensor_cores(facts: Facts) -> Finding | NotApplicable | None:
    visible = visible_gpus(facts)
    if not visible:
        return NotApplicable(reason="no GPU is visible")
    without = [gpu for gpu in visible if not kit.has_fp8(gpu)]
    if not without:
        return None
    have = [
        (gpu.architecture if gpu.vendor == "amd" else gpu.compute_capability) or "unknown" for gpu in without
    ]
    named = ", ".join(dict.fromkeys(f"{gpu.name} ({has})" for gpu, has in zip(without, have, strict=True)))
    asked, on_amd = kit.fp8_was_asked_for(facts), without[0].vendor == "amd"
    layers = sum(linear.use == "training" for linear in facts.linears())
    wanted = asked or (plural(layers, "FP8 layer") if layers else None)
    has_bf16 = all(gpu.vendor == "amd" or kit.capability(gpu) >= kit.FIRST_WITH_BF16 for gpu in without)
    precision = "bf16" if has_bf16 else "fp16"
    raises = needs_fp8(facts) and len(without) == len(visible)
    return Finding(
        severity=None if wanted else "info",
        breaks="step_raises" if raises else NOT_RECORDED,
        title=f"{named} has no FP8 tensor cores"
        if len(visible) == 1
        else f"{len(without)} of {len(visible)} GPUs have no FP8 tensor cores: {named}",
        explanation=f"{OF_AMD if on_amd else OF_NVIDIA} "
        + (
            f"{wanted}: this fails here, or falls back to fp16."
            if wanted
            else "Nothing asks for FP8 here, so you lose nothing."
        ),
        evidence={"gpus": tuple(gpu.name for gpu in without), "have": tuple(have), "fp8_wanted_by": wanted},
        treatment=Treatment(
            name=kit.ON_THIS_GPU[precision],
            summary=f"train in {precision.upper()} on this GPU",
            code=f'accelerator = Accelerator(mixed_precision="{precision}")   # or TrainingArguments(..., '
            f"{precision}=True)"
            if asked
            else "# remove the conversion to FP8",
        )
        if wanted
        else None,
    )


def needs_fp8(facts: Facts) -> bool:
    """Whether a layer multiplies in FP8 on any GPU; Transformer Engine checks the GPU first."""
    return any(
        each.use == "training" and kit.stack_of(each).fuses_casts and not each.features.get("emulate")
        for each in facts.linears()
        if kit.recorded(each, "stack") and kit.recorded(each, "features")
    )


def _on(capability: str) -> Facts:
    gpu = Gpu(name="NVIDIA GPU", vendor="nvidia", compute_capability=capability, visible=True)
    layer = kit.float8(recipe="mxfp8", features={"emulate": False})
    return kit.example(
        cuda="13.0", variables={}, gpus=(gpu,), linears=(layer,), accelerate=None, trainer=None
    )


FIRES = (_on("9.0"), _on("8.0"))
SILENT = _on("10.0")
