"""FP8 layers that compute in BF16

Looks at: whether each Transformer Engine layer ran its last training forward in FP8, as the layer
itself notes it, and at the FP8 GEMMs in one training step of a trial or of a watched script.

Why it costs time. A te.Linear outside te.autocast is an ordinary BF16 layer with two to three times
the host cost of nn.Linear. A converted layer that the model never calls does nothing at all: fused
LoRA kernels and fused cross-entropy read .weight, MultiheadAttention reads out_proj.weight. The
module count looks right and not one FP8 GEMM runs.

What to do. Open the autocast around the forward that trains, and leave no enabled=False inside it.

    output = model(batch)                                  # before: te.Linear in BF16
    with te.autocast(enabled=True, recipe=recipe):         # after
        output = model(batch)

Through Accelerate the forward of the prepared model opens it, in train() mode only: call the object
that prepare() returned, not the model that went in.

Evidence: on one H200 (TE 2.20.2) the flag is False outside the autocast and True inside, and the
kernels agree (nvjet_*_qqtst and qrtst against tst).
https://github.com/NVIDIA/TransformerEngine/issues/1556
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from fp8doctor.analysis.outcome import fp8_never_ran, never_ran_in_script, watched_job
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Arm, Facts, Linear, Network, Trial, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

CALL_LAYERS = Treatment(
    name="call-converted-layers",
    summary="call the converted layers instead of reading their weights",
    code="y = layer(x)   # not: torch.nn.functional.linear(x, layer.weight)",
)


@check(
    "MOD002",
    "fp8-never-engaged",
    area="engagement",
    severity="error",
    changes_fp8=True,
    invalidates_model=True,
)
def fp8_never_engaged(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    if not fp8:
        return NotApplicable(reason="no layer is set up for FP8 training")
    idle = [linear for linear in fp8 if linear.engaged is False]
    in_script = never_ran_in_script(facts)
    none_ran = in_script or (recorded(facts, "trial") and fp8_never_ran(facts.trial))
    if idle:
        return Finding(
            title=f"{len(idle)} of {len(fp8)} FP8 layers ran their last training forward in BF16",
            explanation=f"{idle[0].name} and the others note that their last training forward was outside "
            "the FP8 autocast.",
            evidence={"idle_layers": len(idle), "fp8_layers": len(fp8), "first": idle[0].name},
            treatment=describe("te-autocast", facts),
        )
    if none_ran:
        return Finding(
            title=f"no FP8 GEMM ran in a training step with {plural(len(fp8), 'FP8 layer')}",
            explanation=f"One profiled step of {watched_job(facts) if in_script else 'the job as it is'} "
            "holds no FP8 GEMM: the layers are switched off, or the model never calls them.",
            evidence={"fp8_layers": len(fp8), "fp8_gemms": 0},
            treatment=describe("te-autocast", facts) if fp8[0].stack == "transformer_engine" else CALL_LAYERS,
        )
    ran = recorded(facts, "observed.fp8_gemms") and facts.observed.fp8_gemms
    if not ran and not recorded(facts, "trial") and all(linear.engaged is None for linear in fp8):
        return NotApplicable(
            reason="these layers keep no note of it; only a trial shows whether they run in FP8"
        )
    return None


def _te(engaged: bool) -> Facts:
    return Facts(
        network=Network(
            linears=(Linear(name="up", stack="transformer_engine", use="training", engaged=engaged),)
        )
    )


SICK = _te(engaged=False)
HEALTHY = Facts(network=_te(engaged=True).network, trial=Trial(arms=(Arm(name=ArmName.AS_IS, tried=True),)))
