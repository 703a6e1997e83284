"""Checkpointing recomputes TE layers in BF16

What it finds. Transformer Engine layers are under torch's checkpoint, which recomputes them without FP8.

Why it matters. The recompute runs inside the backward, after the autocast around the forward has closed, and
torch's checkpoint does not know about it. With reentrant checkpointing, the recompute and both gradients
silently run in BF16. Without it, the step raises "A different number of tensors was saved during the original
forward and recomputation". An autocast in the model's own forward has closed by then too.

Fix. Use Transformer Engine's checkpoint, which opens FP8 again, or open the autocast inside the checkpointed
function. For wrappers: `checkpoint_wrapper(block, checkpoint_fn=te.checkpoint)`.

    from torch.utils.checkpoint import checkpoint
    x = checkpoint(block, x, use_reentrant=True)  # before

    import transformer_engine.pytorch as te
    x = te.checkpoint(block, x)                   # after

When to ignore it. If your checkpointed function opens the autocast in a way that fp8doctor does not see.

How it is detected, and limits. fp8doctor finds the layers under torch's checkpoint, and where the autocast
opens. It counts the FP8 matmuls in one step: each layer should run one in the forward, one in the recompute
and one per gradient. If it cannot tell where the autocast opens, the finding is information.

References. One H200 (torch 2.11, TE 2.20.2), autocast around the forward: reentrant, a layer's fp8 flag is
True after the forward and False after the backward; not reentrant, CheckpointError; te.checkpoint, True after
both. https://github.com/NVIDIA/TransformerEngine/issues/776
https://github.com/NVIDIA/TransformerEngine/issues/415
"""

from __future__ import annotations

from fp8doctor.analysis.expected_fp8_gemms import all_fp8, counted_gemms, due_gemms, ran_in_bf16_later
from fp8doctor.analysis.layers import in_python, named
from fp8doctor.analysis.training_bugs import region_of
from fp8doctor.facts import Checkpointing, Facts, Linear, recorded
from fp8doctor.facts.arm_names import Reason
from fp8doctor.facts.examples import example, float8
from fp8doctor.facts.no_number import why_of
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

AROUND_THE_MODEL = "contextual_fp8_autocast"
"""Accelerate's wrapper around the model's forward (1.4 to 1.15, ``utils/transformer_engine.py``)."""


RAN_BEFORE = "They ran in FP8 before, but not in their last forward, the backward's recompute."
OPENED_BY_FORWARD = (
    "The forward opens the autocast around checkpoint; the recompute runs later, in the backward."
)
OPENED_BY_ACCELERATE = (
    "Accelerate opens the autocast around the model's forward; the recompute runs later, in the backward."
)
NOT_KNOWN_WHERE = (
    "fp8doctor cannot see where this job opens the autocast. If it is around the forward, the recompute runs "
    "in BF16 or raises."
)


@check(
    "CKP002",
    "recompute-not-fp8",
    area="checkpointing",
    severity="error",
    invalidates_model=True,
)
def recompute_not_fp8(facts: Facts) -> Finding | NotApplicable | None:
    te = [each for each in facts.network.fp8 if stack_of(each).under_autocast]
    inside = [(linear, region) for linear in te if (region := region_of(linear, facts, "torch"))]
    if not inside:
        return NotApplicable(reason="no Transformer Engine layer is under torch's checkpoint")
    raised = recorded(facts, "trial") and why_of(facts.trial) is Reason.RECOMPUTE_DIFFERS
    missing = ran_in_bf16_later(facts, [linear for linear, _ in inside])
    affected = inside if missing or raised else [each for each in inside if not each[1].opens_fp8_autocast]
    recomputed_in_fp8 = missing is False or (
        facts.training.gradients_seen and all(linear.engaged for linear, _ in affected)
    )
    if not affected or (recomputed_in_fp8 and not raised and not missing):
        return None
    first, region = affected[0]
    watched = recorded(facts, "observed")  # its last forward is that of a training step
    in_bf16 = facts.training.gradients_seen is True and all(
        ran_before(linear) and (each.reentrant or (watched and each.reentrant is None))
        for linear, each in affected
    )
    own = region.get("fp8_autocast_around") is True
    closed = region.active is True and (
        own or any(AROUND_THE_MODEL in each for each in facts.training.forward_chain)
    )
    known = raised or missing or in_bf16 or closed
    state = "not recomputed in FP8" if known else "under a checkpoint that opens no FP8 autocast"
    layers = plural(len(affected), "Transformer Engine layer")
    return Finding(
        severity="error" if known else "info",
        title=f"{layers} {'is' if len(affected) == 1 else 'are'} {state}"
        f"{named([each for each, _ in affected], len(facts.network.fp8))}",
        explanation="The step raised CheckpointError: the recompute saved other tensors than the forward."
        if raised
        else by_the_count(facts)
        if missing
        else RAN_BEFORE
        if in_bf16
        else (OPENED_BY_FORWARD if own else OPENED_BY_ACCELERATE)
        if closed
        else NOT_KNOWN_WHERE,
        evidence={
            "layers": len(affected),
            "first": first.name,
            "region": region.name,
            "form": region.form,
            "reentrant": region.reentrant,
            **(
                {"fp8_gemms": counted_gemms(facts), "fp8_gemms_due": sum(due_gemms(facts, all_fp8(facts)))}
                if missing
                else {}
            ),
        },
        treatment=Treatment(
            name="te-checkpoint",
            summary="recompute with Transformer Engine's checkpoint",
            code=code(facts, region),
        ),
    )


def by_the_count(facts: Facts) -> str:
    """Say what a step ran, and what it should have run."""
    due = due_gemms(facts, all_fp8(facts))
    return (
        f"One step ran {counted_gemms(facts)} FP8 matmuls. The FP8 layers should run {sum(due)}: "
        f"{due.forward} in the forward, {due.recomputed} recomputed, {due.gradients} for gradients. "
        "Everything after the forward ran in BF16."
    )


def ran_before(linear: Linear) -> bool:
    """Whether the layer keeps a trace of an FP8 forward before its last one, which was in BF16."""
    return linear.get("features", {}).get("fp8_ran_before") is True


def code(facts: Facts, region: Checkpointing) -> str:
    """Write the lines that replace torch's function by Transformer Engine's, for this form."""
    if region.form == "huggingface":
        model = in_python("", facts.network)
        lines = (
            f"for module in {model}.modules():",
            "    if hasattr(module, '_gradient_checkpointing_func'):",
            "        module._gradient_checkpointing_func = te.checkpoint",
        )
        return "\n".join(lines)
    if region.form == "wrapper":
        return (
            f"for module in {in_python('modules', facts.network)}():   # after your own wrapping\n"
            "    if isinstance(module, CheckpointWrapper):\n"
            "        module.checkpoint_fn = te.checkpoint"
        )
    return "te.checkpoint(function, x)   # instead of torch's"


def _checkpointed(library: str) -> Facts:
    layer = float8("layers.0.up", stack="transformer_engine", checkpointed="layers.0", engaged=None)
    region = Checkpointing(
        name="layers.0",
        form="wrapper",
        active=True,
        reentrant=False,
        library=library,
        opens_fp8_autocast=False,
    )
    chain = ("accelerate.utils.transformer_engine.contextual_fp8_autocast.<locals>.forward",)
    of_model = {"linears": (layer,), "wrappers": (), "gradients_seen": False}
    return example(**of_model, checkpointing=(region,), forward_chain=chain)


FIRES = _checkpointed(library="torch")
SILENT = _checkpointed(library="transformer_engine")
