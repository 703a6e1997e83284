"""The step has matmuls in fp32

An fp32 matmul runs at a fifteenth of BF16's rate (TF32 at half of it), and FP8 does nothing for it. A
constructor or `from_pretrained` may have left the weights in fp32, or PEFT the adapters (since 0.12), or a
product converts its operands. In one LoRA job, fp32 adapters took 40.3 ms/step (`h200-lora`).

    loss = compute_loss(model, batch)  # before: fp32 matmuls

    import torch
    with torch.autocast("cuda", dtype=torch.bfloat16):  # after
        loss = compute_loss(model, batch)

For adapters: `get_peft_model(..., autocast_adapter_dtype=False)`, before you create the optimizer. Ignore it
if you need fp32 there, for example as a reference. BF16 rounds small updates of adapters away: keep fp32 ones
under autocast, and on an fp16 base, where GradScaler needs them. Up to 10% of the weights in fp32 is fine.
https://huggingface.co/docs/peft/en/package_reference/peft_model
"""

from fp8doctor import kit

LARGE, LARGE_SHARE = 2**27, 0.05  # parameters of fp32 adapters whose memory matters: 1 GiB, a choice
FEW_PCT = 10.0  # of all Linears' parameters, which may be fp32 on purpose: a choice
CAST_BY_LAYER = ("own", "nanochat")  # stacks whose layers cast their operands to BF16 themselves


@kit.check("STP004", "fp32-matmul", severity="warning", explained_by=("fp32-adapters", "fp32-parameters"))
def fp32_matmul(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    profiled = kit.step_difference.profiled_on_gpu(facts)
    if isinstance(profiled, kit.NotApplicable):
        return profiled
    _, found, step = profiled
    spent = found.families_ms.get("gemm_fp32", 0.0)
    if spent < kit.EVEN * step:
        return None
    weights = [linear.name for linear in facts.network.linears if linear.multiplies_in == "float32"]
    most = (facts.get("network.fp32_products", ()) or weights)[:3]
    where = f" They are in {', '.join(kit.in_python(name, facts.network) for name in most)}." if most else ""
    where += "" if weights else " No Linear has fp32 weights: operands are converted to fp32 before."
    instead = "keep the weights in BF16" if weights else "convert no operand to fp32"
    autocast = kit.if_recorded(kit.fp8_request.autocast_of, facts)
    return kit.Finding(
        title=f"Matmuls in fp32 take {spent:,.1f} ms, {kit.percent(100 * spent / step)} of the step",
        explanation=f"In BF16 the same products take a fraction of this.{where}",
        evidence={"gemm_fp32_ms": spent, "modules": tuple(most), "fp32_linears": len(weights)},
        treatment=None if autocast else kit.treatments.autocast_bf16(facts, instead),
    )


@kit.check("STP004", "fp32-adapters", severity="warning", was="LORA002")
def fp32_adapters(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    linears = facts.network.linears
    adapters = [linear for linear in linears if linear.adapter == "adapter"]
    if not any(each.adapter == "base" and each.dtype.startswith(("bfloat16", "float8")) for each in linears):
        return kit.NotApplicable(reason="there is no LoRA on a base in BF16")
    fp32 = [linear for linear in adapters if linear.dtype == "float32"]
    if not fp32:
        return None
    if kit.fp8_request.under_unsloth(facts):
        return kit.NotApplicable(reason="Unsloth multiplies the adapters in 16 bits")
    autocast, on_meta = kit.fp8_request.autocast_of(facts), "meta" in facts.network.devices
    multiplied = any(linear.use != "training" for linear in fp32)
    trains = kit.fp8_request.less_than_fp32_is_wanted(facts) or facts.training.gradients_seen
    held = sum(each.parameters for each in fp32)
    large = held >= max(LARGE, LARGE_SHARE * facts.get("network.parameters", 0))
    base = "an FP8" if any(map(kit.stores_fp8, linears)) else "a BF16"
    costs = "Without autocast, each is an fp32 matmul. Each adapted layer copies its input to fp32."
    if autocast or not multiplied:
        costs = "They multiply in FP8 or, under autocast, in 16 bits, and copy each input to fp32."
    if large:
        costs += f" Weights and gradients take {8 * held / 2**30:.1f} GiB, half of it in BF16."
    return kit.Finding(
        severity=None if large or (multiplied and not autocast and trains and not on_meta) else "info",
        title=f"{len(fp32)} of {len(adapters)} LoRA matrices are fp32 on {base} base"
        f"{kit.named(fp32, len(adapters))}",
        explanation=costs,
        evidence={"fp32_adapters": len(fp32), "adapters": len(adapters), "first": fp32[0].name},
        treatment=adapters_to_bf16(fp32),
    )


def adapters_to_bf16(adapters: list[kit.Linear]) -> kit.Treatment:
    which = '"lora_" in name' if kit.conversion.has_lora(adapters) else "parameter.requires_grad"
    code = f"for name, parameter in model.named_parameters():\n    if {which}:\n"
    code += "        parameter.data = parameter.data.to(torch.bfloat16)"
    return kit.Treatment(
        name=kit.treatment_table.ADAPTERS_TO_BF16,
        summary="give the adapters the base's dtype, before you create the optimizer",
        code=code
        + "   # or get_peft_model(..., autocast_adapter_dtype=False)" * (".lora_A." in adapters[0].name),
    )


@kit.check("STP004", "fp32-parameters", severity="warning", was="MEM003")
def fp32_parameters(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    wanted, linears = kit.fp8_request.less_than_fp32_is_wanted(facts), facts.network.linears
    if wanted is None:
        return kit.NotApplicable(reason="nothing asks for less than fp32, and no step was timed on a GPU")
    total = sum(linear.parameters for linear in linears) or 1
    in_fp32 = (each for each in linears if each.multiplies_in == "float32" and each.use != "storage")
    fp32 = [each for each in in_fp32 if each.stack not in CAST_BY_LAYER]
    # Heads, routers and LoRA's matrices may be fp32 on purpose.
    body = [each for each in fp32 if each.role in ("body", "experts") and each.adapter != "adapter"]
    few = 100 * sum(each.parameters for each in body) / total <= FEW_PCT
    if few or kit.fp8_request.autocast_of(facts) is not None:
        return None
    share = 100 * sum(each.parameters for each in fp32) / total
    return kit.Finding(
        title=f"{len(fp32)} of {kit.plural(len(linears), 'Linear')} are fp32, and no autocast is on",
        explanation=f"{wanted}, but {kit.percent(share)} of the weights are fp32, and so are activations. "
        "FP8 casts then read twice the bytes, and attention loses its fast backends.",
        evidence={"fp32_linears": len(fp32), "fp32_share_pct": round(share, 1), "first": fp32[0].name},
        treatment=kit.treatments.autocast_bf16(facts),
    )


def _lora(base: str, adapter: str, fp32_ms: float) -> kit.Facts:
    layer = kit.float8("q_proj.base_layer", adapter="base", dtype=base)
    lora = kit.float8("q_proj.lora_A.default", adapter="adapter", use="none", dtype=adapter)
    step = kit.profiled(kit.ArmName.AS_IS, {"gemm_fp8": 60.0, "gemm_fp32": fp32_ms})
    of_job = {"wrappers": (), "devices": ("cuda",), "gradients_seen": True, "packages": {}, "autocast": None}
    return kit.example(linears=(layer, lora), device="cuda", arms=(step,), **of_job)


_ADAPTERS = _lora("bfloat16", "float32", 0.4)
FIRES = (_ADAPTERS, _lora("float32", "bfloat16", 0.4), _lora("bfloat16", "bfloat16", 14.0))
SILENT = _lora("bfloat16", "bfloat16", 0.4)
