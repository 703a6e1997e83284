"""A recipe that this GPU or CUDA cannot run

Looks at: the recipe of each FP8 layer, the one that Accelerate's variables ask for, the compute
capability of the first visible GPU, or its architecture where it is AMD's, and the CUDA that torch
was built with. Where CUDA is in use already, a tiny `torch._scaled_mm` of the recipe is tried.

Why it matters. Tensor cores, cuBLAS and the hand-written kernels take some formats only: MXFP8 and
NVFP4 need Blackwell (compute capability 10.x), 128x128 block scaling 9.0 and, in Transformer
Engine, CUDA 12.9. Transformer Engine's NVFP4 runs on 12.x (RTX 50) too, but its random Hadamard
transform and stochastic rounding, both on by default, are made for 10.0 and 10.3: before 2.16 the
step raises, before 2.19 the gradients are zero, and training there is documented for no version.
One scale per row has failed on 8.9, a B200 and 12.0, depending on the version: hence the try. What
is not there raises in the first step.

AMD: one scale per tensor runs on gfx94x, gfx95x and gfx120x; torchao's MXFP8 on gfx950 (MI350,
MI355) alone, its 128x128 blocks on none; AMD's fork of Transformer Engine takes gfx94x and gfx95x.

What to do. Take the recipe that fits: tensorwise runs wherever there are FP8 tensor cores, current
scaling is Transformer Engine's.

    quantize_(model, MXFP8TrainingOpConfig())                       # before: on an H100
    config = Float8LinearConfig.from_recipe_name("tensorwise")      # after
    convert_to_float8_training(model, config=config)

A recipe that is emulated on purpose (`emulate=True`, `kernel_preference=EMULATED`) runs anywhere,
slowly, and is another disease.

Evidence: Transformer Engine 2.20 `pytorch/quantization.py` (`check_mxfp8_support`,
`check_fp8_block_scaling_support`, `check_nvfp4_support`), torchao 0.18 (`mxfp8/quant.py` compares
with major version 10, `blockwise_fp8_training/linear.py`: "Only support SM90").
https://github.com/pytorch/pytorch/issues/130359 https://github.com/pytorch/pytorch/issues/192707
https://github.com/pytorch/ao/issues/2904 https://github.com/pytorch/ao/issues/4582
https://github.com/NVIDIA/TransformerEngine/issues/3062 (NVFP4 on 12.0; also #2956, #2968, #3281;
its `nvfp4.rst`: "Training: SM 10.0, SM 10.3")
https://github.com/ROCm/TransformerEngine/issues/359 ("gfx94x or gfx95x required for FP8 execution")
"""

from __future__ import annotations

from fp8doctor.analysis.recipe_support import (
    assumed_gpus,
    capability,
    has_fp8,
    needs,
    unmet,
    unmet_on_amd,
)
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.facts import NOT_RECORDED, Environment, Facts, Gpu, Linear, Network, Software
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import RECIPES, Recipe
from fp8doctor.registry import check
from fp8doctor.wording import plural

PLAIN_NVFP4 = Recipe(stack="transformer_engine", name="nvfp4", first=(10, 0))
"""Of Transformer Engine's NVFP4 without random Hadamard transform and stochastic rounding."""

MXFP8_VARIABLE = "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"
"""Makes Accelerate's Transformer Engine backend ask for MXFP8, and raise where it is not there. Source:
accelerate 1.11 to 1.15, ``utils/transformer_engine.py``: "MXFP8 block scaling is not available"."""

YES = ("1", "true", "yes", "y", "t", "on")
"""What Accelerate's ``str_to_bool`` takes for a yes."""

TREATMENTS = {
    "torchao": Treatment(
        name="recipe-that-fits",
        summary="convert with the tensorwise recipe, which every GPU with FP8 tensor cores runs",
        code='config = Float8LinearConfig.from_recipe_name("tensorwise")\nconvert_to_float8_training(model, '
        "config=config)",
    ),
    "transformer_engine": Treatment(
        name="recipe-that-fits",
        summary="current scaling, which every GPU with FP8 tensor cores runs",
        code="with te.autocast(recipe=Float8CurrentScaling()):\n    output = model(**batch)",
    ),
    "nvfp4": Treatment(
        name="recipe-that-fits",
        summary="NVFP4 without random Hadamard transform and stochastic rounding, or current scaling",
        code="recipe = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)\n"
        "with te.autocast(recipe=recipe):\n    output = model(**batch)",
    ),
    "accelerate": Treatment(
        name="recipe-that-fits", summary="let Accelerate take delayed scaling", code=f"unset {MXFP8_VARIABLE}"
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
    layers = [
        linear
        for linear in facts.network.linears
        if linear.use == "training" and linear.recipe and not linear.features.get("emulate")
    ]
    wanted = {(linear.stack, linear.recipe or ""): needs_of(linear) for linear in layers}
    by_variable = not layers and mxfp8_by_variable(facts.environment.variables)
    if by_variable:
        wanted["transformer_engine", "mxfp8"] = RECIPES["transformer_engine", "mxfp8"]
    if not wanted:
        return NotApplicable(reason="no FP8 layer says with which recipe it runs")
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
        treatment=TREATMENTS[
            "accelerate" if by_variable else "nvfp4" if nvfp4 else "torchao" if gpu.vendor == "amd" else stack
        ],
    )


def mxfp8_by_variable(variables: dict[str, str]) -> bool:
    """Whether Accelerate will ask Transformer Engine for MXFP8."""
    return (
        variables.get("ACCELERATE_FP8_BACKEND") == "TE" and variables.get(MXFP8_VARIABLE, "").lower() in YES
    )


def needs_of(linear: Linear) -> Recipe:
    """Tell what the recipe of a layer needs, with the settings that it was given."""
    plain = linear.features.get("disable_rht") and linear.features.get("disable_stochastic_rounding")
    if plain and linear.recipe == "nvfp4":
        return PLAIN_NVFP4
    return needs(linear.stack, linear.recipe or "")


def _machine(compute_capability: str) -> Facts:
    layer = Linear(name="up", stack="torchao", use="training", recipe="mxfp8", features={"emulate": False})
    return Facts(
        software=Software(cuda="13.0"),
        environment=Environment(variables={}),
        gpus=(
            Gpu(
                name="NVIDIA H100 80GB HBM3",
                vendor="nvidia",
                compute_capability=compute_capability,
                visible=True,
            ),
        ),
        network=Network(linears=(layer,)),
    )


SICK = _machine("9.0")
HEALTHY = _machine("10.0")
