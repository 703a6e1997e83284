"""FP8 layers that compute in 16 bits

The model has FP8 layers, but some or all of them compute in BF16, never run, or only emulate FP8. A te.Linear
outside te.autocast is a BF16 layer with two to three times the host cost of an nn.Linear. A converted layer
that the model never calls does nothing: fused LoRA kernels and fused cross-entropy read `.weight`, and
MultiheadAttention reads `out_proj.weight`. With `emulate=True` (and `MXLinearConfig()` of torchao 0.10 to
0.16) layers cast to FP8 and back and multiply in 16 or 32 bits, so they are slower than without FP8.

    output = model(**batch)      # before: te.Linear in BF16

    import transformer_engine.pytorch as te
    with te.autocast():          # after (Transformer Engine 2.9 or newer; older: te.fp8_autocast)
        output = model(**batch)

With Accelerate, call the model that `prepare()` returned, in train() mode: its forward opens the autocast.
Each Transformer Engine layer notes whether its last training forward ran in FP8. Of a profiled step fp8doctor
counts the FP8 matmuls (three per layer), and warns if a quarter is missing. Ignore it if you keep the first
and last layers in BF16 on purpose, or study the numerics of FP8.
https://github.com/NVIDIA/TransformerEngine/issues/1556
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/config.py
"""

from __future__ import annotations

from typing import Any

from fp8doctor import kit

MISSING = 0.25
"""Share of the expected FP8 matmuls that did not run. A choice: six times the 4% by which the count differs
in a sound step (`fp8doctor.analysis.expected_fp8_gemms`)."""

CALL_LAYERS = kit.Treatment(
    name="call-converted-layers",
    summary="call the converted layers instead of reading their weights",
    code="y = layer(x)   # not: torch.nn.functional.linear(x, layer.weight)",
)

OLD_MX = kit.Treatment(
    name="real-mx-kernel",
    summary="use a recipe with a real kernel; on a GPU without MX, train in BF16 or tensorwise FP8",
    code="from torchao.prototype.mx_formats import MXLinearConfig\n"
    'config = MXLinearConfig.from_recipe_name("mxfp8_cublas")\n'
    "quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))",
)
"""For MX layers before torchao 0.17."""


@kit.check(
    "MOD002",
    "fp8-never-engaged",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def fp8_never_engaged(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8 = facts.network.fp8
    if not fp8:
        return kit.NotApplicable(reason="no layer is set up for FP8 training")
    idle = [linear for linear in fp8 if linear.engaged is False]
    layers, autocast = kit.plural(len(fp8), "FP8 layer"), kit.describe(kit.TE_AUTOCAST, facts)
    evidence: dict[str, Any] = {
        "idle_layers": len(idle),
        "fp8_layers": len(fp8),
        "first": (idle or fp8)[0].name,
    }

    def found(
        title: str, why: str, fix: kit.Treatment | None, severity: kit.Severity | None = None
    ) -> kit.Finding:
        return kit.Finding(title=title, explanation=why, evidence=evidence, treatment=fix, severity=severity)

    on_purpose, in_script = kit.kept_in_bf16(fp8), kit.never_ran_in_script(facts)
    if idle and not on_purpose:
        return found(
            f"{len(idle)} of {len(fp8)} FP8 layers ran their last training forward in "
            f"BF16{kit.named(idle, len(fp8))}",
            f"The layers themselves note it, such as {idle[0].name}: that forward was outside the FP8 "
            "autocast.",
            autocast,
        )
    if in_script or (kit.recorded(facts, "trial") and kit.fp8_never_ran(facts.trial)):
        if all(each.get("features", {}).get("emulate") for each in fp8):
            return kit.NotApplicable(reason="these layers emulate FP8, which uses no FP8 matmul")
        return found(
            f"No FP8 matmul ran in a training step with {layers}",
            f"One profiled step of {kit.watched_job(facts) if in_script else 'the job as it is'} has no FP8 "
            "matmul: the layers are switched off, or the model never calls them.",
            autocast if kit.stack_of(fp8[0]).under_autocast else CALL_LAYERS,
        )
    if on_purpose:
        return found(
            f"{len(idle)} of {len(fp8)} FP8 layers, at the ends of the model, ran in "
            f"BF16{kit.named(idle, len(fp8))}",
            "All layers between them ran in FP8. First and last layers often stay in BF16 on purpose. If "
            "yours should not, the autocast opens too late or closes too early.",
            None,
            "info",
        )
    counted = kit.counted_gemms(facts)
    if (
        counted is not None and kit.all_fp8(facts) and not recomputes(facts) and kit.is_given(facts)
    ):  # else CKP002
        evidence |= {"fp8_gemms": counted, "fp8_gemms_due": (due := sum(kit.due_gemms(facts, fp8)))}
        if counted < (1 - MISSING) * due:
            return found(
                f"Only {counted} FP8 matmuls ran in a training step; {layers} should run {due}",
                "Each layer runs one in the forward and one per gradient. The others ran in another "
                "precision or not at all: the model reads weights without calling the layers, or skips "
                "them.",
                CALL_LAYERS,
                "warning",
            )
    if facts.get("observed.fp8_gemms") or kit.recorded(facts, "trial") or any(each.engaged for each in fp8):
        return None
    if kit.outside_autocast(facts):
        return found(
            "The training step opens no FP8 autocast around "
            f"{kit.plural(len(fp8), f'{kit.stack_of(fp8[0]).in_words} layer')}",
            "Outside te.autocast these layers compute in BF16. Neither the code of the training step nor a "
            "forward of the model opens one.",
            autocast,
        )
    return kit.NotApplicable(reason="these layers do not note it; only a trial shows whether they run in FP8")


def recomputes(facts: kit.Facts) -> bool:
    """Whether something is, or may be, recomputed in the backward."""
    if facts.get("trial.recomputed"):
        return True
    return any(each.active is not False for each in facts.training.checkpointing)


@kit.check(
    "MOD002",
    "emulated-fp8",
    area="engagement",
    severity="error",
    was="MOD005",
    explained_by=("no-fp8-tensor-cores",),
    changes_fp8=True,
    invalidates_model=True,
)
def emulated_fp8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    fp8 = facts.network.fp8
    emulated = [linear for linear in fp8 if linear.features.get("emulate")]
    if not emulated:
        return None if fp8 else kit.NotApplicable(reason="no FP8 layer in the model")
    if not emulated[0].kind.startswith("torchao.float8."):
        fix = kit.mxfp8_without_biases("real-mx-kernel", facts) if kit.has_op_configs(facts) else OLD_MX
    else:
        here = any(map(kit.has_fp8, facts.get("gpus", ())))
        fix = kit.Treatment(
            name="real-fp8-kernel",
            summary=f"convert without emulation{'' if here else '; on a GPU without FP8, train in BF16'}",
            code=kit.convert_again(facts, config="Float8LinearConfig(emulate=False)"),
        )
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
