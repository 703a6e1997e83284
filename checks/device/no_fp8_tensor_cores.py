"""A GPU without FP8 tensor cores

What it finds. A visible GPU has no FP8 tensor cores.

Why it matters. FP8 tensor cores begin with compute capability 8.9 (Ada: L4, L40S, RTX 4090) and 9.0 (Hopper).
Ampere has none: an A100 (8.0), an A10 or an RTX 3090 (8.6) multiply TF32, BF16, FP16 and INT8. FP8 cannot be
faster than BF16 there. `torch._scaled_mm` and Transformer Engine refuse to run. Accelerate falls back to
fp16, which needs loss scaling that BF16 does not.

Fix. Use BF16 on this GPU, and FP8 on Ada, Hopper, Blackwell, or AMD's MI300, MI350 and RX 9000.

    accelerator = Accelerator(mixed_precision="fp8")   # before: fp16 on an A100, with a warning

    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="bf16")  # after

When to ignore it. If nothing asks for FP8 on this GPU; it is only information then.

How it is detected, and limits. fp8doctor reads the compute capability (NVIDIA) or architecture (AMD) of the
GPUs that CUDA_VISIBLE_DEVICES leaves to this job, or of the GPU in --assume-gpu. AMD with FP8: gfx942
(MI300X, MI325X; float8_e4m3fnuz), gfx950 (MI350) and gfx1200, gfx1201 (RX 9000; both float8_e4m3fn), gfx1250
from ROCm 7.14 on. Without FP8: gfx90a (MI250) and gfx11 (RX 7000).

References. `_scaled_mm_allowed_device` in torch, `state.py` in accelerate 1.15.0; Transformer Engine: "Device
compute capability 8.9 or higher required for FP8 execution." https://docs.nvidia.com/cuda/ada-tuning-guide/
https://docs.nvidia.com/cuda/ampere-tuning-guide/
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import fp8_was_asked_for
from fp8doctor.analysis.recipe_support import AMD_WITH_FP8, FIRST_WITH_BF16, assumed_gpus, capability, has_fp8
from fp8doctor.analysis.treatment_table import ON_THIS_GPU
from fp8doctor.facts import NOT_RECORDED, Facts, Gpu, recorded
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural


@check("GPU001", "no-fp8-tensor-cores", area="device", severity="error", invalidates_model=True)
def no_fp8_tensor_cores(facts: Facts) -> Finding | NotApplicable | None:
    visible = [gpu for gpu in facts.gpus if gpu.visible] or assumed_gpus(facts)
    if not visible:
        return NotApplicable(reason="no GPU is visible")
    without = [gpu for gpu in visible if not has_fp8(gpu)]
    if not without:
        return None
    named = ", ".join(dict.fromkeys(f"{gpu.name} ({version_of(gpu)})" for gpu in without))
    asked = fp8_was_asked_for(facts)
    wanted = asked or present(facts)
    precision = (
        "bf16"
        if all(gpu.vendor == "amd" or capability(gpu) >= FIRST_WITH_BF16 for gpu in without)
        else "fp16"
    )
    return Finding(
        severity=None if wanted else "info",
        breaks="step_raises" if needs_fp8(facts) and len(without) == len(visible) else NOT_RECORDED,
        title=f"{named} has no FP8 tensor cores"
        if len(visible) == 1
        else f"{len(without)} of {len(visible)} GPUs have no FP8 tensor cores: {named}",
        explanation=(
            "FP8 tensor cores begin with compute capability 8.9 (Ada) and 9.0 (Hopper); Ampere has none. "
            if without[0].vendor == "nvidia"
            else "Of AMD's GPUs gfx94x, gfx95x, gfx120x and gfx125x have FP8 matrix cores. "
        )
        + (
            f"{wanted}: this fails here, or falls back to fp16."
            if wanted
            else "Nothing asks for FP8 here, so you lose nothing."
        ),
        evidence={
            "gpus": tuple(gpu.name for gpu in without),
            "have": tuple(version_of(gpu) for gpu in without),
            "needed": "8.9" if without[0].vendor == "nvidia" else ", ".join(AMD_WITH_FP8),
            "fp8_wanted_by": wanted,
        },
        treatment=Treatment(
            name=ON_THIS_GPU[precision],
            summary=f"train in {precision.upper()} on this GPU",
            code=f'accelerator = Accelerator(mixed_precision="{precision}")   # or TrainingArguments(..., '
            f"{precision}=True)"
            if asked
            else "# remove the conversion to FP8",
        )
        if wanted
        else None,
    )


def version_of(gpu: Gpu) -> str:
    """Return what decides: compute capability or architecture."""
    return (gpu.architecture if gpu.vendor == "amd" else gpu.compute_capability) or "unknown"


def needs_fp8(facts: Facts) -> bool:
    """Whether a layer multiplies in FP8 on any GPU; Transformer Engine checks the GPU first."""
    return any(
        each.use == "training" and stack_of(each).fuses_casts and not each.features.get("emulate")
        for each in facts.linears()
        if recorded(each, "stack") and recorded(each, "features")
    )


def present(facts: Facts) -> str | None:
    """Name the FP8 layers of the model, in words; None without any."""
    linears = facts.linears()
    count = sum(linear.use == "training" for linear in linears)
    return plural(count, "FP8 layer") if count else None


def _machine(name: str, capability: str) -> Facts:
    gpu = Gpu(name=name, vendor="nvidia", compute_capability=capability, architecture=None, visible=True)
    return example(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}, gpus=(gpu,))


FIRES = _machine("NVIDIA A100-SXM4-80GB", "8.0")
SILENT = _machine("NVIDIA H100 80GB HBM3", "9.0")
