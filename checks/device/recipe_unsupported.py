"""This GPU or CUDA cannot run FP8, or not this recipe

FP8 tensor cores begin with compute capability 8.9 (Ada: L4, L40S, RTX 4090) and 9.0 (Hopper). Ampere has
none: FP8 raises there or, in Accelerate, becomes fp16. AMD's gfx94x (MI300), gfx95x (MI350), gfx120x and
gfx125x have FP8 cores; which recipe runs there fp8doctor does not judge. MXFP8 and NVFP4 need Blackwell
(10.x); 128x128 blocks need 9.0 and, in Transformer Engine, CUDA 12.9 (Hopper too before 2.9). On 8.9
torchao's rowwise scales need torch 2.7. For NVFP4 on 12.x (RTX 50) see ENV005 and the first issue below.

    from torchao.quantization import quantize_
    quantize_(model, MXFP8TrainingOpConfig())  # before: on an H100

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    config = Float8LinearConfig.from_recipe_name("tensorwise")  # after
    convert_to_float8_training(model, config=config)

Tensorwise (torchao) and current scaling (Transformer Engine) run wherever FP8 does. Without FP8 cores, train
in BF16: `Accelerator(mixed_precision="bf16")`. Ignore it if the job will run on another GPU; name it with
`--assume-gpu`. If nothing asks for FP8, it is information. Recipes that are emulated on purpose: MOD002.
https://github.com/NVIDIA/TransformerEngine/issues/3062
https://github.com/pytorch/pytorch/issues/130359
"""

from fp8doctor import kit

NVFP4_UNJUDGED = (11, 0)
"""On 12.x it runs from Transformer Engine 2.19 on, or without Hadamard transform and stochastic rounding."""


@kit.check("GPU002", "recipe-unsupported", severity="error", **kit.NO_FP8_STEP)
def recipe_unsupported(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    gpu = next(iter(kit.recipe_support.gpus_of(facts)), None)
    if gpu is None or not kit.recipe_support.has_fp8(gpu):
        none = "the first visible GPU has no FP8 tensor cores" if gpu else "no GPU is visible"
        return kit.NotApplicable(reason=none)
    layers = [each for each in facts.network.fp8 if each.recipe and not each.features.get("emulate")]
    wanted = {(each.stack, each.recipe or ""): kit.recipes.recipe_of(each) for each in layers}
    if not wanted:
        return kit.NotApplicable(reason="no FP8 layer names its recipe")
    if kit.recipe_support.capability(gpu) >= NVFP4_UNJUDGED:
        wanted.pop(("transformer_engine", "nvfp4"), None)
    reasons = {
        own: why for own, needs in wanted.items() if (why := kit.recipe_support.unmet(needs, gpu, facts))
    }
    if not reasons:
        return None
    (stack, recipe), reason = next(iter(reasons.items()))
    fix = "te-current" if stack == "transformer_engine" else kit.recipes.FASTEST[0]
    texts = [f"{name} ({owner}): {text}" for (owner, name), text in reasons.items()]
    return kit.Finding(
        title=f"{recipe} does not run here: {reason}",
        explanation=f"{'. '.join(texts)}. The first step raises.",
        evidence={
            "recipes": tuple(name for _, name in reasons),
            "layers": sum((linear.stack, linear.recipe) in reasons for linear in layers),
            "gpu": gpu.name,
            "capability": gpu.compute_capability,
        },
        breaks="step_raises" if layers and not kit.own_step.ran_on_a_gpu(facts) else kit.NOT_RECORDED,
        treatment=kit.describe(fix, facts),
    )


@kit.check("GPU002", "no-fp8-tensor-cores", severity="error", invalidates_model=True, was="GPU001")
def no_fp8_tensor_cores(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    visible = kit.recipe_support.gpus_of(facts)
    if not visible:
        return kit.NotApplicable(reason="no GPU is visible")
    without = [gpu for gpu in visible if not kit.recipe_support.has_fp8(gpu)]
    if not without:
        return None
    have = [gpu.architecture if gpu.vendor == "amd" else gpu.compute_capability for gpu in without]
    named = dict.fromkeys(f"{gpu.name} ({has or 'unknown'})" for gpu, has in zip(without, have, strict=True))
    asked, layers = kit.fp8_was_asked_for(facts), sum(each.use == "training" for each in facts.linears())
    wanted = asked or (kit.plural(layers, "FP8 layer") if layers else None)
    raises = len(without) == len(visible) and any(  # Transformer Engine checks the GPU first
        each.use == "training" and kit.stack_of(each).fuses_casts and not each.features.get("emulate")
        for each in facts.linears()
        if kit.recorded(each, "stack") and kit.recorded(each, "features")
    )
    effect = f"{wanted}: this fails here, or falls back to fp16." if wanted else "Nothing asks for FP8 here."
    ampere = all(each.vendor == "amd" or kit.recipe_support.capability(each) >= (8, 0) for each in without)
    precision = "bf16" if ampere else "fp16"
    fix = kit.Treatment(
        name=kit.treatment_table.ON_THIS_GPU[precision],
        summary=f"train in {precision.upper()} on this GPU, without the conversion to FP8",
        code=f'accelerator = Accelerator(mixed_precision="{precision}")'
        if asked
        else kit.treatments.leave_fp8_out(facts),
    )
    return kit.Finding(
        severity=None if wanted else "info",
        breaks="step_raises" if raises else kit.NOT_RECORDED,
        title=f"No FP8 tensor cores: {', '.join(named)}",
        explanation=effect,
        evidence={"gpus": tuple(gpu.name for gpu in without), "have": tuple(have), "fp8_wanted_by": wanted},
        treatment=fix if wanted else None,
    )


def _on(capability: str) -> kit.Facts:
    gpu = kit.Gpu(name="NVIDIA GPU", vendor="nvidia", compute_capability=capability, visible=True)
    layer = kit.float8(recipe="mxfp8", features={"emulate": False})
    asked = dict.fromkeys(("accelerate", "trainer"))
    return kit.example(cuda="13.0", variables={}, gpus=(gpu,), linears=(layer,), **asked)


FIRES = (_on("9.0"), _on("8.0"))
SILENT = _on("10.0")
