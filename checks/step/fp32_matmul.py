"""The step has matmuls in fp32

An fp32 matmul runs at a fifteenth of BF16's rate (TF32 at half of it), and FP8 does nothing for it. A
constructor or `from_pretrained` may have left the weights in fp32, without an autocast. PEFT creates fp32
adapters for any base (since 0.12), or a product converts its operands. Activations then take twice the
memory, attention loses its fast backends, and an FP8 layer casts twice the bytes. In one LoRA job, fp32
adapters took 40.3 ms/step (`h200-lora`).

    loss = compute_loss(model, batch)  # before: fp32 matmuls

    import torch
    with torch.autocast("cuda", dtype=torch.bfloat16):  # after
        loss = compute_loss(model, batch)

BF16 weights save memory too. For adapters: `get_peft_model(..., autocast_adapter_dtype=False)`, before you
create the optimizer. TF32 is cheaper than fp32.

Ignore it if you need fp32 there, for example as a reference. BF16 rounds small updates of adapters away: keep
fp32 ones under autocast, and on an fp16 base, where GradScaler needs them. Up to 10% of the weights in fp32
is fine; heads, routers and adapters do not count. Unsloth casts adapters itself. MEM004 covers attention
without a fused kernel.
https://docs.pytorch.org/docs/stable/notes/cuda.html
https://huggingface.co/docs/peft/en/package_reference/peft_model
"""

from __future__ import annotations

from fp8doctor import kit
from fp8doctor.kit import Facts, Finding, NotApplicable, Treatment, autocast_of, check, percent, plural

SMALL_PCT = 3.0
"""Percent of the step below which fp32 matmuls are not reported: what fp8doctor calls even."""

FEW_PCT = 10.0
"""Percent of all Linears' parameters that may be fp32. A choice: some parts are fp32 on purpose."""

NAMED = 3  # modules, a choice of length
ADAPTERS_TO_BF16 = Treatment(
    name="adapters-to-bf16",
    summary="give the adapters the base's dtype, before you create the optimizer",
    code='for name, parameter in model.named_parameters():\n    if "lora_" in name:\n'
    "        parameter.data = parameter.data.to(torch.bfloat16)"
    "   # or get_peft_model(..., autocast_adapter_dtype=False)",
)
PRODUCT = Treatment(
    name="product-in-bf16",
    summary="compute the product in BF16, and convert its result if you need fp32",
    code="output = operand.bfloat16() @ weight.bfloat16()   # and no autocast(enabled=False) around it",
)


@check(
    "STP004",
    "fp32-matmul",
    area="step",
    severity="warning",
    explained_by=("fp32-adapters", "fp32-parameters"),
)
def fp32_matmul(facts: Facts) -> Finding | NotApplicable | None:
    profiled = kit.profiled_on_gpu(facts)
    if isinstance(profiled, NotApplicable):
        return profiled
    _, found, step = profiled
    spent = found.families_ms.get("gemm_fp32", 0.0)
    if 100 * spent / step < SMALL_PCT:
        return None
    of = {each.name: each.families_ms.get("gemm_fp32", 0.0) for each in found.modules}
    most = sorted((name for name, ms in of.items() if ms >= kit.SHOWN_MS), key=lambda name: -of[name])[:NAMED]
    weights = [linear.name for linear in facts.network.linears if linear.multiplies_in == "float32"]
    if most:
        launched = (f"{kit.in_words(name, facts.network)} ({of[name]:,.1f} ms)" for name in most)
        where = f"The launching modules: {', '.join(launched)}."
    elif weights:
        where = (
            f"{plural(len(weights), 'Linear')} {'has' if len(weights) == 1 else 'have'} fp32 weights; the "
        )
        where += f"first is {kit.in_words(weights[0], facts.network)}."
    else:
        where = "No Linear has fp32 weights: the operands are converted to fp32 before the product."
    instead = "keep the weights in BF16" if weights else "convert no operand to fp32"
    return Finding(
        title=f"Matmuls in fp32 take {spent:,.1f} ms, {percent(100 * spent / step)} of the step",
        explanation=f"In BF16 the same products take a fraction of this. {where}",
        evidence={
            "gemm_fp32_ms": spent,
            "share_pct": 100 * spent / step,
            "step_ms": step,
            "modules": tuple(most or weights[:NAMED]),
            "fp32_linears": len(weights),
        },
        treatment=PRODUCT
        if kit.if_recorded(autocast_of, facts) is not None
        else Treatment(
            name=kit.AUTOCAST_BF16,
            summary=f"run forward and loss under BF16 autocast, or {instead}",
            code='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = compute_loss(model, batch)',
        ),
    )


@check("STP004", "fp32-adapters", area="step", severity="warning", was="LORA002")
def fp32_adapters(facts: Facts) -> Finding | NotApplicable | None:
    linears = facts.network.linears
    adapters = [linear for linear in linears if linear.adapter == "adapter"]
    if not any(each.adapter == "base" and each.dtype.startswith(("bfloat16", "float8")) for each in linears):
        return NotApplicable(reason="the base is not in BF16" if adapters else "no LoRA in the model")
    fp32 = [linear for linear in adapters if linear.dtype == "float32"]
    if not fp32:
        return None
    if kit.under_unsloth(facts):
        return NotApplicable(
            reason="Unsloth casts the adapters to the base's dtype and multiplies in 16 bits"
        )
    autocast, on_meta = autocast_of(facts), "meta" in facts.network.devices
    multiplied = any(linear.use != "training" for linear in fp32)
    trains = less_than_fp32_is_wanted(facts) or facts.training.gradients_seen
    copies = "A copy of each input to fp32 remains."
    if not multiplied:
        costs = f"They were converted to FP8 themselves and multiply in FP8. {copies}"
    elif autocast:
        costs = f"Under {autocast} autocast they multiply in 16 bits. {copies}"
    else:
        costs = "Without autocast, each is an fp32 matmul, and each adapted layer copies its input to fp32."
    if on_meta:
        costs += (
            " On the meta device PEFT leaves them in fp32 even if you pass `autocast_adapter_dtype=False`."
        )
    return Finding(
        severity=None if multiplied and not autocast and trains and not on_meta else "info",
        title=f"{len(fp32)} of {len(adapters)} LoRA matrices are fp32 on a BF16 base"
        f"{kit.named(fp32, len(adapters))}",
        explanation=costs,
        evidence={
            "fp32_adapters": len(fp32),
            "adapters": len(adapters),
            "fp32_parameters": sum(linear.parameters for linear in fp32 if linear.parameters),
            "autocast": autocast,
            "first": fp32[0].name,
        },
        treatment=ADAPTERS_TO_BF16,
    )


@check("STP004", "fp32-parameters", area="step", severity="warning", was="MEM003")
def fp32_parameters(facts: Facts) -> Finding | NotApplicable | None:
    wanted, linears = less_than_fp32_is_wanted(facts), facts.network.linears
    if wanted is None:
        return NotApplicable(reason="nothing asks for less than fp32, and no step was timed on a GPU")
    total = sum(linear.parameters for linear in linears) or 1
    fp32 = [each for each in linears if is_fp32(each)]
    # Heads, routers and LoRA's matrices may be fp32 on purpose.
    body = [each for each in fp32 if each.role in ("body", "experts") and each.adapter != "adapter"]
    if 100 * sum(each.parameters for each in body) / total <= FEW_PCT or autocast_of(facts) is not None:
        return None
    share = 100 * sum(each.parameters for each in fp32) / total
    fp8 = sum(each.use == "training" for each in body)
    casts = f"{plural(fp8, 'FP8 layer')} {'casts' if fp8 == 1 else 'cast'} twice the bytes. " if fp8 else ""
    model = kit.wrapped_in_python(facts.network)
    return Finding(
        title=f"{len(fp32)} of {plural(len(linears), 'Linear')} are fp32, and no autocast is on",
        explanation=f"{wanted}, but {percent(share)} of the weights are fp32, and so are the activations. "
        f"{casts}Other matmuls run in fp32, and attention runs without its fast backends.",
        evidence={
            "fp32_linears": len(fp32),
            "linears": len(linears),
            "fp32_share_pct": round(share, 1),
            "fp32_fp8_layers": fp8,
            "wanted_by": wanted,
            "first": fp32[0].name,
        },
        treatment=Treatment(
            name=kit.AUTOCAST_BF16,
            summary="run forward and loss under BF16 autocast, or keep the weights in BF16",
            code="autocast = torch.autocast(next(model.parameters()).device.type, dtype=torch.bfloat16)\n"
            f'{model}.forward = autocast({model}.forward)   # or "with autocast:" around forward and loss',
        ),
    )


def less_than_fp32_is_wanted(facts: Facts) -> str | None:
    """Say who wants FP8 or BF16 for this model; None before Accelerate's `prepare` puts it under autocast."""
    accelerate, fp8 = kit.accelerate_of_model(facts), len(facts.network.fp8)
    if accelerate and accelerate.mixed_precision in ("bf16", "fp8"):
        return f"Accelerate prepared it for {accelerate.mixed_precision}" if accelerate.prepared else None
    if fp8:
        return f"The model has {plural(fp8, 'FP8 layer')}"
    timed = any(arm.name == kit.ArmName.AS_IS and arm.step_ms for arm in facts.arms())
    return "The step was measured" if timed and facts.trial.device.startswith("cuda") else None


def is_fp32(linear: kit.Linear) -> bool:
    """Whether it multiplies in fp32. A user's own FP8 layer casts what it multiplies."""
    return linear.multiplies_in == "float32" and linear.use != "storage" and linear.stack != "own"


def _lora(base: str, adapter: str, fp32_ms: float) -> Facts:
    """A base and an adapter of these dtypes, and a profiled step on a GPU; its times are invented."""
    layer = kit.float8("q_proj.base_layer", adapter="base", dtype=base)
    lora = kit.float8("q_proj.lora_A.default", adapter="adapter", use="none", dtype=adapter)
    step = kit.profiled(kit.ArmName.AS_IS, {"gemm_fp8": 60.0, "gemm_fp32": fp32_ms}, modules=())
    of_job = {"wrappers": (), "devices": ("cuda",), "gradients_seen": True, "packages": {}, "autocast": None}
    return kit.example(linears=(layer, lora), device="cuda", arms=(step,), **of_job)


FIRES = (
    _lora("bfloat16", "float32", fp32_ms=0.4),
    _lora("bfloat16", "bfloat16", fp32_ms=14.0),
    _lora("float32", "bfloat16", fp32_ms=0.4),
)
SILENT = _lora("bfloat16", "bfloat16", fp32_ms=0.4)
