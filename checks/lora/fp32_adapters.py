"""LoRA adapters in fp32 on a BF16 base

What it finds. LoRA's matrices are fp32 while their base layers are BF16.

Why it matters. PEFT creates fp32 adapters for any base (`autocast_adapter_dtype=True`, since 0.12). Without
autocast, every adapted layer copies its input to fp32 and multiplies it by A and B in fp32. It uses no tensor
cores unless TF32 is on. In a small model, 81 of 108 matmuls were fp32. On an H200, a 1B model with rank 16
took longer than its full fine-tuning (143.6 ms against 128.4 ms, compiled). Under autocast only the copies
remain.

Fix. Give the adapters the base's dtype before you create the optimizer (PEFT 0.12 or newer).

    model = get_peft_model(base, config)                                # before: fp32

    from peft import get_peft_model
    model = get_peft_model(base, config, autocast_adapter_dtype=False)  # after: like the base

When to ignore it. If you want fp32 adapters, because BF16 rounds small updates away: keep them under
autocast. On an fp16 base you need them: PyTorch's GradScaler refuses fp16 gradients.

How it is detected, and limits. fp8doctor compares the dtypes and looks for an autocast. It warns only if the
step is known: FP8 layers, a gradient or a measured step. It is information under autocast, before a Trainer's
autocast, for adapters in FP8 (SHP002), and on the meta device, where PEFT does not convert adapters.
Unsloth's kernels cast the matrices themselves: there it does not apply.

References. `tests/benchmarks/measured/h200_steps.json.gz`; PEFT 0.21.2 (`cast_adapter_dtype`); Unsloth
2026.10 (`matmul_lora`).
https://huggingface.co/docs/peft/en/package_reference/peft_model https://github.com/AgileRL/AgileRL/issues/623
(a fifth less peak memory) https://github.com/kohya-ss/sd-scripts/issues/1156 (6.8 to 4.5 s per iteration)
"""

from __future__ import annotations

from fp8doctor.analysis.arms import uses_fp8
from fp8doctor.analysis.fp8_request import accelerate_of_model, autocast_of, under_unsloth
from fp8doctor.analysis.layers import named
from fp8doctor.facts import ArmName, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

CODE = """for name, parameter in model.named_parameters():
    if "lora_" in name:
        parameter.data = parameter.data.to(torch.bfloat16)   \
# or get_peft_model(..., autocast_adapter_dtype=False)"""


@check("LORA002", "fp32-adapters", area="lora", severity="warning")
def fp32_adapters(facts: Facts) -> Finding | NotApplicable | None:
    adapters = [linear for linear in facts.network.linears if linear.adapter == "adapter"]
    if not adapters:
        return NotApplicable(reason="no LoRA in the model")
    if not any(
        linear.adapter == "base" and linear.dtype.startswith(("bfloat16", "float8"))
        for linear in facts.network.linears
    ):
        return NotApplicable(reason="the base is not in BF16")
    fp32 = [linear for linear in adapters if linear.dtype == "float32"]
    if not fp32:
        return None
    if under_unsloth(facts):
        return NotApplicable(
            reason="Unsloth casts the adapters to the base's dtype and multiplies in 16 bits"
        )
    autocast, on_meta = autocast_of(facts), "meta" in facts.network.devices
    multiplied = [linear for linear in fp32 if linear.use != "training"]
    unsure = " On the meta device PEFT leaves them in fp32 even if you pass `autocast_adapter_dtype=False`."
    if not multiplied:
        costs = (
            "They were converted to FP8 themselves and multiply in FP8. A copy of each input to fp32 remains."
        )
    elif autocast is None:
        costs = "Without autocast, each is an fp32 matmul, and each adapted layer copies its input to fp32."
    else:
        costs = f"Under {autocast} autocast they multiply in 16 bits. A copy of each input to fp32 remains."
    return Finding(
        severity=None if multiplied and autocast is None and trains(facts) and not on_meta else "info",
        title=f"{len(fp32)} of {len(adapters)} LoRA matrices are fp32 on a BF16 base"
        f"{named(fp32, len(adapters))}",
        explanation=costs + (unsure if on_meta else ""),
        evidence={
            "fp32_adapters": len(fp32),
            "adapters": len(adapters),
            "fp32_parameters": sum(linear.parameters for linear in fp32 if linear.parameters),
            "autocast": autocast,
            "first": fp32[0].name,
        },
        treatment=Treatment(
            name="adapters-to-bf16",
            summary="give the adapters the base's dtype, before you create the optimizer",
            code=CODE,
        ),
    )


def trains(facts: Facts) -> bool:
    """Whether the step is known as it will run: converted, trained or measured."""
    accelerate = accelerate_of_model(facts)
    if accelerate and accelerate.mixed_precision in ("bf16", "fp8") and not accelerate.prepared:
        return False
    timed = any(arm.name == ArmName.AS_IS and arm.step_ms for arm in facts.arms())
    return uses_fp8(facts) or facts.training.gradients_seen or timed


def _lora(dtype: str) -> Facts:
    names = ("q_proj.lora_A.default", "q_proj.lora_B.default")
    adapters = [float8(name, adapter="adapter", use="none", dtype=dtype) for name in names]
    linears = (float8("q_proj.base_layer", adapter="base"), *adapters)
    return example(devices=("cuda",), linears=linears, autocast=None, gradients_seen=False)


FIRES = _lora("float32")
SILENT = _lora("bfloat16")
