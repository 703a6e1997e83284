"""FP8 that Accelerate turned into FP16

Looks at: who asked for FP8, the precision of Accelerate's state, and the compute capability of the
GPUs.

Why it costs time. Below compute capability 8.9 Accelerate turns fp8 into fp16, not into bf16, with
one line in the log. FP16 is no faster than BF16 there and needs a loss scaler: one more pass over
all gradients, a synchronisation and skipped steps; and its range overflows where BF16's does not.
Accelerate decides by torch's current device, which is the first visible GPU unless the script chose
another.

What to do. Ask for bf16 on a GPU without FP8.

    accelerator = Accelerator(mixed_precision="fp8")    # before, on an A100: fp16
    accelerator = Accelerator(mixed_precision="bf16")   # after

Evidence: `AcceleratorState.__init__` and `check_cuda_fp8_capability` of accelerate 1.15.0, run with
a stand-in for torch's answer on an A100. From 1.6 on the function first runs `nvidia-smi
--query-gpu=compute_capability`. The driver has no such field (its name is `compute_cap`), so the
answer is torch's. https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py
https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/environment.py
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import fp8_was_asked_for, was_prepared
from fp8doctor.analysis.recipe_support import FIRST_WITH_BF16, capability
from fp8doctor.facts import Accelerate, Environment, Facts, Gpu, Training
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import FIRST_WITH_FP8
from fp8doctor.registry import check


@check("GPU003", "silent-fp16-fallback", area="device", severity="error", explained_by=("GPU001",))
def silent_fp16_fallback(facts: Facts) -> Finding | NotApplicable | None:
    accelerate = facts.training.accelerate
    if accelerate is None:
        return NotApplicable(reason="no Accelerator was made")
    old = [
        gpu
        for gpu in facts.gpus
        if gpu.visible is not False
        and gpu.compute_capability
        and FIRST_WITH_BF16 <= capability(gpu) < FIRST_WITH_FP8
    ]
    if not old:
        return NotApplicable(
            reason="no GPU lies between compute capability 8.0, below which fp16 is right, and 8.9, from "
            "which fp8 is"
        )
    asked = fp8_was_asked_for(facts) or converted(facts)
    if asked is None:
        return NotApplicable(reason="nobody asked for FP8")
    trainer = facts.trainer()
    if accelerate.mixed_precision != "fp16" or (trainer and trainer.fp16):
        return None
    named = f"{old[0].name} ({old[0].compute_capability})"
    return Finding(
        title=f"Accelerate fell back from fp8 to fp16 because of {named}",
        explanation=f"{asked} asks for FP8, and {named} has no FP8 tensor cores. FP16 needs loss scaling and "
        "overflows where BF16 does not.",
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
    """Tell whether the model was converted all the same: ``Accelerator(mixed_precision="fp8")`` leaves fp16
    in the state."""
    linears = facts.linears()
    return (
        "the converted model"
        if was_prepared(facts) and any(linear.use == "training" for linear in linears)
        else None
    )


def _fallen(precision: str) -> Facts:
    return Facts(
        environment=Environment(variables={"ACCELERATE_MIXED_PRECISION": "fp8"}),
        gpus=(Gpu(name="NVIDIA A100-SXM4-80GB", vendor="nvidia", compute_capability="8.0", visible=True),),
        training=Training(
            accelerate=Accelerate(mixed_precision=precision, distributed="NO", prepared=True), trainer=None
        ),
    )


SICK = _fallen("fp16")
HEALTHY = _fallen("bf16")
