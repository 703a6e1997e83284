"""FP8 is emulated, not computed

What it finds. FP8 layers are set to emulate FP8: they cast to FP8 and back, and multiply in 16 or 32 bits.

Why it matters. Emulation lets you study FP8 numerics on any device. You pay for every cast, and no FP8 tensor
core is used. Such a model is always slower than the same model without FP8. `MXLinearConfig()` in torchao
0.10 to 0.16 emulates unless you name a recipe or a kernel; in later versions the recipe's name says so. MXFP8
in torchao 0.17 and 0.18 drops biases (MOD013), so the fix converts only layers without one to it.

Fix. Ask for the real kernel on a GPU that has it; on any other GPU stay in BF16. For MX layers, use
`MXFP8TrainingRecipe.MXFP8_RCEIL` (compute capability 10.x).

    config = Float8LinearConfig(emulate=True)   # before

    from torchao.float8 import Float8LinearConfig
    config = Float8LinearConfig(emulate=False)  # after

When to ignore it. If you study numerics and do not need speed.

How it is detected, and limits. fp8doctor reads each layer's setting: `emulate` in torchao's
Float8LinearConfig, and the kernel that MX and NVFP4 layers and weights ask for. Other libraries' layers are
not covered.

References. torchao 0.18 (`float8_ops.py`, `moe_training/config.py`), 0.10 to 0.16 (`mx_formats/config.py`).
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/config.py
"""

from __future__ import annotations

from fp8doctor.analysis.layers import flops_share_pct, named
from fp8doctor.analysis.recipe_support import has_fp8, has_op_configs
from fp8doctor.diagnosis.treatments import convert_again, mxfp8_without_biases
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

OLD_MX = Treatment(
    name="real-mx-kernel",
    summary="use a recipe with a real kernel; on a GPU without MX, train in BF16 or tensorwise FP8",
    code="from torchao.prototype.mx_formats import MXLinearConfig\n"
    'config = MXLinearConfig.from_recipe_name("mxfp8_cublas")\n'
    "quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))",
)
"""For MX layers before torchao 0.17."""


@check(
    "MOD005",
    "emulated-fp8",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
    explained_by=("GPU001",),
)
def emulated_fp8(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = facts.network.fp8
    if not fp8:
        return NotApplicable(reason="no FP8 layer in the model")
    emulated = [linear for linear in fp8 if linear.features.get("emulate")]
    if not emulated:
        return None
    first = emulated[0]
    return Finding(
        title=f"{len(emulated)} of {len(fp8)} FP8 layers emulate FP8{named(emulated, len(fp8))}",
        explanation="They cast to FP8 and back, and multiply in 16 or 32 bits. You pay for the casts, and "
        "the FP8 tensor cores stay idle.",
        evidence={
            "emulated_layers": len(emulated),
            "fp8_layers": len(fp8),
            "flops_share_pct": round(flops_share_pct(emulated, facts), 1),
            "recipe": first.recipe,
            "first": first.name,
        },
        treatment=without_emulation(facts)
        if first.kind.startswith("torchao.float8.")
        else mxfp8_without_biases("real-mx-kernel", facts)
        if has_op_configs(facts)
        else OLD_MX,
    )


def without_emulation(facts: Facts) -> Treatment:
    """Describe converting the same layers without emulation."""
    return Treatment(
        name="real-fp8-kernel",
        summary="convert without emulation"
        + ("" if any(map(has_fp8, facts.get("gpus", ()))) else "; on a GPU without FP8, train in BF16"),
        code=convert_again(facts, config="Float8LinearConfig(emulate=False)"),
    )


FIRES = example(linears=(float8(features={"emulate": True}),))
SILENT = example(linears=(float8(features={"emulate": False}),))
