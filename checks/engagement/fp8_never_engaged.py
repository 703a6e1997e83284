"""FP8 layers that compute in 16 bits

The model has FP8 layers, but some or all of them compute in BF16, never run, or only emulate FP8. A te.Linear
outside te.autocast is a BF16 layer with two to three times the host cost of an nn.Linear. A converted layer
that the model never calls does nothing: fused LoRA kernels and fused cross-entropy read `.weight`. With
`emulate=True` layers cast to FP8 and back and multiply in 16 or 32 bits, so they are slower than without FP8.

    output = model(**batch)      # before: te.Linear in BF16

    import transformer_engine.pytorch as te
    with te.autocast():          # after (Transformer Engine 2.9 or newer; older: te.fp8_autocast)
        output = model(**batch)

With Accelerate, call the model that `prepare()` returned, in train() mode: its forward opens the autocast.
fp8doctor warns if a quarter of the FP8 matmuls (three per layer) is missing in a profiled step. Ignore it if
you keep the first and last layers in BF16 on purpose, or study the numerics of FP8.
https://github.com/NVIDIA/TransformerEngine/issues/1556
"""

from fp8doctor import kit

MISSING = 0.25
"""Share of the expected FP8 matmuls that did not run. A choice: six times the 4% by which the count differs
in a sound step (`fp8doctor.analysis.own_step`)."""

CALL_LAYERS = kit.Treatment(
    name="call-converted-layers",
    summary="call the converted layers instead of reading their weights",
    code="y = layer(x)   # not: torch.nn.functional.linear(x, layer.weight)",
)


@kit.check("MOD002", "fp8-never-engaged", severity="error", **kit.WRONG_FP8_STEP)
def fp8_never_engaged(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8, counted = facts.network.fp8, kit.own_step.counted_gemms(facts)
    idle = [each for each in fp8 if each.engaged is False]
    layers, on_purpose = kit.plural(len(fp8), "FP8 layer"), kit.own_step.kept_in_bf16(fp8)
    fix: kit.Treatment | None = kit.describe(kit.treatment_table.TE_AUTOCAST, facts)
    severity: kit.Severity | None = None
    if idle and not on_purpose:
        title = f"{len(idle)} of {len(fp8)} FP8 layers ran their last training forward in BF16"
        title += kit.named(idle, len(fp8))
        why = f"The layers themselves note it, such as {idle[0].name}: that forward was outside the autocast."
    elif kit.own_step.ran_in_fp8(facts) is False:
        if all(each.get("features", {}).get("emulate") for each in fp8):
            return kit.NotApplicable(reason="these layers emulate FP8, which uses no FP8 matmul")
        title = f"No FP8 matmul ran in a training step with {layers}"
        why = "One profiled step has none: the layers are switched off, or the model never calls them."
        fix = fix if kit.stack_of(fp8[0]).under_autocast else CALL_LAYERS
    elif on_purpose:
        title = f"{len(idle)} of {len(fp8)} FP8 layers, at the ends of the model, ran in BF16"
        title += kit.named(idle, len(fp8))
        why = "All layers between them ran in FP8. First and last layers often stay in BF16 on purpose. If "
        why += "yours should not, the autocast opens too late or closes too early."
        fix, severity = None, "info"
    elif counted is not None and counted < (1 - MISSING) * (due := expected(facts)):
        title = f"Only {counted} FP8 matmuls ran in a training step; {layers} should run {due}"
        why = "Each layer runs one in the forward and one per gradient. The others ran in another precision "
        why += "or not at all: the model reads weights without calling the layers, or skips them."
        fix, severity = CALL_LAYERS, "warning"
    elif facts.get("observed.fp8_gemms") or kit.recorded(facts, "trial") or any(each.engaged for each in fp8):
        return None
    elif kit.own_step.outside_autocast(facts):
        title = f"The training step opens no FP8 autocast around {layers} of {kit.stack_of(fp8[0]).in_words}"
        why = "Outside te.autocast these layers compute in BF16. Neither the code of the training step nor a "
        why += "forward of the model opens one."
    else:
        return kit.NotApplicable(reason="these layers do not note it; only a trial shows if they run in FP8")
    return kit.Finding(
        title=title,
        explanation=why,
        severity=severity,
        evidence={
            "idle_layers": len(idle),
            "fp8_layers": len(fp8),
            "fp8_gemms": counted,
            "first": (idle or fp8)[0].name,
        },
        treatment=fix,
    )


def expected(facts: kit.Facts) -> int:
    """Count the FP8 matmuls due in a step; 0 if something is, or may be, recomputed, which CKP002 judges."""
    recomputes = any(each.active is not False for each in facts.training.checkpointing)
    sure = kit.own_step.all_fp8(facts) and not recomputes and kit.layer_gain.is_given(facts)
    return sum(kit.own_step.due_gemms(facts, facts.network.fp8)) if sure else 0


@kit.check(
    "MOD002",
    "emulated-fp8",
    severity="error",
    was="MOD005",
    explained_by=("no-fp8-tensor-cores",),
    **kit.WRONG_FP8_STEP,
)
def emulated_fp8(facts: kit.Facts) -> kit.Finding | None:
    fp8 = facts.network.fp8
    emulated = [linear for linear in fp8 if linear.features.get("emulate")]
    if not emulated:
        return None
    fix = kit.Treatment(
        name="real-fp8-kernel",
        summary="convert without emulation; on a GPU without FP8, train in BF16",
        code=kit.conversion.conversion(facts, config="Float8LinearConfig(emulate=False)"),
    )
    if not emulated[0].kind.startswith("torchao.float8."):
        fix = kit.conversion.mxfp8_without_biases("real-mx-kernel", facts)
    return kit.Finding(
        title=f"{len(emulated)} of {len(fp8)} FP8 layers emulate FP8{kit.named(emulated, len(fp8))}",
        explanation="They cast to FP8 and back, and multiply in 16 or 32 bits. You pay for the casts, and "
        "the FP8 tensor cores stay idle.",
        evidence={
            "emulated_layers": len(emulated),
            "fp8_layers": len(fp8),
            "flops_share_pct": round(kit.flops_share_pct(emulated, facts), 1),
            "first": emulated[0].name,
        },
        treatment=fix,
    )


def _te(engaged: bool) -> kit.Facts:
    layer = kit.float8(stack="transformer_engine", engaged=engaged)
    return kit.example(linears=(layer,), arms=(kit.Arm(name=kit.ArmName.AS_IS, tried=True),))


FIRES = _te(False), kit.example(linears=(kit.float8(features={"emulate": True}, engaged=None),))
SILENT = _te(True)
