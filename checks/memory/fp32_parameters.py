"""An FP8 or BF16 job that computes in fp32

What it finds. Much of the model's weights are fp32 and no autocast is on, although the job asked for less.

Why it matters. fp32 weights without autocast produce fp32 activations. Every Linear that is not FP8 is an
fp32 matmul; an FP8 layer casts inputs of 4 bytes instead of 2 and returns fp32. Attention loses its fast
backends: flash and cuDNN attention accept only 16 bits. Activations take twice the memory. The usual cause is
`from_pretrained` or a constructor that creates fp32, then a conversion to FP8, and no autocast.

Fix. BF16 autocast keeps fp32 weights for the optimizer. BF16 weights save memory too.

    loss = compute_loss(model, batch)  # before: fp32 matmuls

    import torch
    with torch.autocast("cuda", dtype=torch.bfloat16):  # after
        loss = compute_loss(model, batch)

When to ignore it. If you want fp32, for example as a reference.

How it is detected, and limits. fp8doctor compares the Linears' weight dtypes with what the job asked for: FP8
layers, a prepared Accelerator, or a measured step. Up to 10% of the weights in fp32 is fine; heads, routers
and adapters do not count.

References. With torch 2.13 and torchao 0.18, an fp32 Float8Linear's output is fp32.
https://github.com/NVIDIA/Megatron-LM/issues/883 (FP8 without --bf16 is far slower)
https://github.com/NVIDIA/TransformerEngine/issues/1119 (fp32 module, half the speed)
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
"""

from __future__ import annotations

from fp8doctor.analysis.fp8_request import accelerate_of_model, autocast_of
from fp8doctor.analysis.layers import wrapped_in_python
from fp8doctor.analysis.treatment_table import AUTOCAST_BF16
from fp8doctor.facts import ArmName, Facts, Linear
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent, plural

SMALL_PCT = 10.0
"""Percent of all Linears' parameters that may be fp32. A choice: some parts are fp32 on purpose."""


@check("MEM003", "fp32-parameters", area="memory", severity="warning")
def fp32_parameters(facts: Facts) -> Finding | NotApplicable | None:
    wanted = less_than_fp32_is_wanted(facts)
    if wanted is None:
        return NotApplicable(reason="nothing asks for less than fp32, and no step was timed on a GPU")
    fp32 = [linear for linear in facts.network.linears if computes_in_fp32(linear)]
    total = sum(linear.parameters for linear in facts.network.linears)
    share = 100.0 * sum(linear.parameters for linear in fp32) / total if total else 0.0
    if share <= SMALL_PCT or autocast_of(facts) is not None:
        return None
    fp8 = sum(linear.use == "training" for linear in fp32)
    fp32 = list(filter(_is_fp32, facts.network.linears))  # a head that may be fp32 is counted too
    share = 100.0 * sum(linear.parameters for linear in fp32) / total
    return Finding(
        title=f"{len(fp32)} of {plural(len(facts.network.linears), 'Linear')} are fp32, and no autocast is "
        "on",
        explanation=f"{wanted}, but {percent(share)} of the weights are fp32, and so are the activations. "
        + (f"{plural(fp8, 'FP8 layer')} {'casts' if fp8 == 1 else 'cast'} twice the bytes. " if fp8 else "")
        + "Other matmuls run in fp32, and attention runs without its fast backends.",
        evidence={
            "fp32_linears": len(fp32),
            "linears": len(facts.network.linears),
            "fp32_share_pct": round(share, 1),
            "fp32_fp8_layers": fp8,
            "wanted_by": wanted,
            "first": fp32[0].name,
        },
        treatment=Treatment(
            name=AUTOCAST_BF16,
            summary="run forward and loss under BF16 autocast, or keep the weights in BF16",
            code=code(wrapped_in_python(facts.network)),
        ),
    )


def code(model: str) -> str:
    """Write the lines that run this module's forward under BF16 autocast."""
    return (
        "autocast = torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)\n"
        f'{model}.forward = autocast({model}.forward)   # or "with autocast:" around forward and loss'
    )


def less_than_fp32_is_wanted(facts: Facts) -> str | None:
    """Say who wants FP8 or BF16 for this model; None before Accelerate's `prepare` puts it under autocast."""
    accelerate = accelerate_of_model(facts)
    if accelerate and accelerate.mixed_precision in ("bf16", "fp8"):
        return f"Accelerate prepared it for {accelerate.mixed_precision}" if accelerate.prepared else None
    fp8 = len(facts.network.fp8)
    if fp8:
        return f"The model has {plural(fp8, 'FP8 layer')}"
    timed = any(arm.name == ArmName.AS_IS and arm.step_ms for arm in facts.arms())
    return "The step was measured" if timed and facts.trial.device.startswith("cuda") else None


def computes_in_fp32(linear: Linear) -> bool:
    """Whether this is a layer of the body with an fp32 weight.

    Heads, routers and LoRA's matrices may be fp32 on purpose. A user's own FP8 layer casts what it
    multiplies (nanochat keeps an fp32 master weight); FSDP casts what it gathers.
    """
    return _is_fp32(linear) and linear.role in ("body", "experts") and linear.adapter != "adapter"


def _is_fp32(linear: Linear) -> bool:
    return linear.multiplies_in == "float32" and linear.use != "storage" and linear.stack != "own"


FIRES = example(linears=(float8(dtype="float32"),), autocast=None)
SILENT = example(linears=(float8(dtype="float32"),), autocast="bfloat16")
