"""FP8 that Accelerate turned into FP16

What it finds. You asked for FP8, and Accelerate trains in FP16 because a GPU has no FP8.

Why it matters. Below compute capability 8.9, Accelerate turns fp8 into fp16, not into bf16, and only logs a
line. FP16 is no faster than BF16 there and needs a loss scaler: one more pass over all gradients, a
synchronization and skipped steps. Its range overflows where BF16's does not.

Fix. Ask for bf16 on a GPU without FP8.

    accelerator = Accelerator(mixed_precision="fp8")   # before, on an A100: fp16

    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="bf16")  # after

When to ignore it. If you want FP16 here; then ask for fp16 explicitly.

How it is detected, and limits. fp8doctor compares who asked for FP8 with Accelerate's precision and the GPUs'
compute capability (8.0 to below 8.9). Accelerate decides by torch's current device: the first visible GPU,
unless the script chose another.

References. `AcceleratorState.__init__` and `check_cuda_fp8_capability` of accelerate 1.15.0, run with a
stand-in for an A100. From 1.6 on the function first runs `nvidia-smi --query-gpu=compute_capability`, a field
that the driver does not have (it is `compute_cap`), so torch's answer counts.
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/environment.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import fp8_was_asked_for, was_prepared
from fp8doctor.analysis.recipe_support import FIRST_WITH_BF16, capability
from fp8doctor.facts import Accelerate, Facts, Gpu
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import FIRST_WITH_FP8
from fp8doctor.registry import check


@check("GPU003", "silent-fp16-fallback", area="device", severity="error", explained_by=("GPU001",))
def silent_fp16_fallback(facts: Facts) -> Finding | NotApplicable | None:
    accelerate = facts.training.accelerate
    if accelerate is None:
        return NotApplicable(reason="there is no Accelerator")
    old = [
        gpu
        for gpu in facts.gpus
        if gpu.visible is not False
        and gpu.compute_capability
        and FIRST_WITH_BF16 <= capability(gpu) < FIRST_WITH_FP8
    ]
    if not old:
        return NotApplicable(reason="no GPU has a compute capability from 8.0 to below 8.9")
    asked = fp8_was_asked_for(facts) or converted(facts)
    if asked is None:
        return NotApplicable(reason="nothing asks for FP8")
    trainer = facts.trainer()
    if accelerate.mixed_precision != "fp16" or (trainer and trainer.fp16):
        return None
    named = f"{old[0].name} ({old[0].compute_capability})"
    return Finding(
        title=f"Accelerate fell back from fp8 to fp16 because of {named}",
        explanation=f"{asked} asks for FP8, and {named} has no FP8 tensor cores. FP16 needs loss scaling "
        "and overflows where BF16 does not.",
        evidence={
            "asked_by": asked,
            "precision": "fp16",
            "gpu": old[0].name,
            "compute_capability": old[0].compute_capability,
            "needed": "8.9",
        },
        treatment=Treatment(
            name="bf16-on-this-gpu",
            summary="train in BF16 on this GPU",
            code='accelerator = Accelerator(mixed_precision="bf16")   # or TrainingArguments(..., bf16=True)',
        ),
    )


def converted(facts: Facts) -> str | None:
    """Whether the model was converted: ``Accelerator(mixed_precision="fp8")`` leaves fp16 in the state."""
    linears = facts.linears()
    return (
        "the converted model"
        if was_prepared(facts) and any(linear.use == "training" for linear in linears)
        else None
    )


def _fallen(precision: str) -> Facts:
    gpu = Gpu(name="NVIDIA A100-SXM4-80GB", vendor="nvidia", compute_capability="8.0", visible=True)
    accelerate = Accelerate(mixed_precision=precision, distributed="NO", prepared=True)
    asked = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    return example(variables=asked, gpus=(gpu,), accelerate=accelerate, trainer=None)


SICK = _fallen("fp16")
HEALTHY = _fallen("bf16")
