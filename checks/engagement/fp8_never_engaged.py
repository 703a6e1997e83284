"""FP8 layers that compute in BF16

What it finds. The model has FP8 layers, but some or all of them compute in BF16, or never run.

Why it matters. A te.Linear outside te.autocast is an ordinary BF16 layer with two to three times the host
cost of an nn.Linear. A converted layer that the model never calls does nothing. Fused LoRA kernels and fused
cross-entropy, for example, read `.weight`; MultiheadAttention reads `out_proj.weight`. The list of modules
looks right, but no FP8 matmul runs.

Fix. Open the autocast around the forward that trains, and leave no `enabled=False` inside it. With
Accelerate, call the model that `prepare()` returned, in train() mode: its forward opens it.

    output = model(**batch)      # before: te.Linear in BF16

    import transformer_engine.pytorch as te
    with te.autocast():          # after (Transformer Engine 2.9 or newer; older: te.fp8_autocast)
        output = model(**batch)

When to ignore it. If you keep the first and last layers in BF16 on purpose: this is only information.

How it is detected, and limits. Each Transformer Engine layer notes whether its last training forward ran in
FP8. fp8doctor also counts the FP8 matmuls of one profiled training step (three per layer: forward and both
gradients). With a batch of yours it warns if a quarter is missing. Without either, it reads the training
step's code for an autocast.

References. On an H200 with TE 2.20.2, the flag is False outside the autocast and True inside; the kernels
agree. https://github.com/NVIDIA/TransformerEngine/issues/1556 https://github.com/NVIDIA/bionemo-framework
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, kept_in_bf16
from fp8doctor.analysis.layers import named
from fp8doctor.analysis.losing_layers import is_given
from fp8doctor.analysis.outcome import fp8_never_ran, never_ran_in_script, outside_autocast, watched_job
from fp8doctor.analysis.treatment_table import TE_AUTOCAST
from fp8doctor.diagnosis.treatments import describe
from fp8doctor.facts import Arm, ArmName, Facts, Linear, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

MISSING = 0.25
"""Share of the expected FP8 matmuls that did not run. A choice: six times the 4% by which the count differs
in a sound step (`fp8doctor.analysis.expected_fp8_gemms`)."""

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
    fp8 = facts.network.fp8
    if not fp8:
        return NotApplicable(reason="no layer is set up for FP8 training")
    idle = [linear for linear in fp8 if linear.engaged is False]
    in_script = never_ran_in_script(facts)
    none_ran = in_script or (recorded(facts, "trial") and fp8_never_ran(facts.trial))
    on_purpose = kept_in_bf16(fp8)
    if idle and not on_purpose:
        return Finding(
            title=f"{len(idle)} of {len(fp8)} FP8 layers ran their last training forward in BF16"
            f"{named(idle, len(fp8))}",
            explanation=f"The layers themselves note it, such as {idle[0].name}: their last training "
            "forward was outside the FP8 autocast.",
            evidence={"idle_layers": len(idle), "fp8_layers": len(fp8), "first": idle[0].name},
            treatment=describe(TE_AUTOCAST, facts),
        )
    if none_ran and all(each.get("features", {}).get("emulate") for each in fp8):
        return NotApplicable(reason="these layers emulate FP8, which uses no FP8 matmul (MOD005)")
    if none_ran:
        return Finding(
            title=f"No FP8 matmul ran in a training step with {plural(len(fp8), 'FP8 layer')}",
            explanation=f"One profiled step of {watched_job(facts) if in_script else 'the job as it is'} "
            "has no FP8 matmul: the layers are switched off, or the model never calls them.",
            evidence={"fp8_layers": len(fp8), "fp8_gemms": 0},
            treatment=describe(TE_AUTOCAST, facts) if stack_of(fp8[0]).under_autocast else CALL_LAYERS,
        )
    if on_purpose:
        return Finding(
            severity="info",
            title=f"{len(idle)} of {len(fp8)} FP8 layers, at the ends of the model, ran in "
            f"BF16{named(idle, len(fp8))}",
            explanation="All layers between them ran in FP8. First and last layers often stay in BF16 on "
            "purpose. If yours should not, the autocast opens too late or closes too early.",
            evidence={"idle_layers": len(idle), "fp8_layers": len(fp8), "first": idle[0].name},
        )
    if finding := some_never_ran(facts, fp8):
        return finding
    ran = facts.get("observed.fp8_gemms") or recorded(facts, "trial")
    if not ran and all(linear.engaged is None for linear in fp8):
        if outside_autocast(facts):
            return without_autocast(fp8, facts)
        return NotApplicable(reason="these layers do not note it; only a trial shows whether they run in FP8")
    return None


def without_autocast(fp8: list[Linear], facts: Facts) -> Finding:
    """Report layers that need an FP8 autocast in a step whose code opens no FP8 autocast."""
    return Finding(
        title="The training step opens no FP8 autocast around "
        f"{plural(len(fp8), f'{stack_of(fp8[0]).in_words} layer')}",
        explanation="Outside te.autocast these layers compute in BF16. Neither the code of the training "
        "step nor a forward of the model opens one.",
        evidence={"idle_layers": len(fp8), "fp8_layers": len(fp8), "first": fp8[0].name},
        treatment=describe(TE_AUTOCAST, facts),
    )


def some_never_ran(facts: Facts, fp8: list[Linear]) -> Finding | None:
    """Report FP8 matmuls that a step should have run; CKP002 covers recomputation."""
    counted = counted_gemms(facts)
    if counted is None or not all_fp8(facts) or recomputed(facts) or not is_given(facts):
        return None
    due = sum(due_gemms(facts, fp8))
    if counted >= (1 - MISSING) * due:
        return None
    return Finding(
        severity="warning",
        title=f"Only {counted} FP8 matmuls ran in a training step; {plural(len(fp8), 'FP8 layer')} should "
        f"run {due}",
        explanation="Each layer runs one in the forward and one per gradient. The others ran in another "
        "precision or not at all: the model reads weights without calling the layers, or skips them.",
        evidence={"fp8_layers": len(fp8), "fp8_gemms": counted, "fp8_gemms_due": due},
        treatment=CALL_LAYERS,
    )


def recomputed(facts: Facts) -> bool:
    """Whether something is, or may be, recomputed in the backward."""
    return bool(facts.get("trial.recomputed")) or any(
        each.active is not False for each in facts.training.checkpointing
    )


def _te(engaged: bool, *arms: Arm) -> Facts:
    return example(linears=(float8(stack="transformer_engine", engaged=engaged),), arms=arms)


FIRES = _te(False)
SILENT = _te(True, Arm(name=ArmName.AS_IS, tried=True))
