"""Checkpointing recomputes TE layers in BF16

The recompute of torch's checkpoint runs inside the backward, after the autocast around the forward has
closed. With reentrant checkpointing, the recompute and both gradients of Transformer Engine layers silently
run in BF16. Without it, the step raises "A different number of tensors was saved during the original forward
and recomputation". An autocast in the model's own forward has closed by then too.

    from torch.utils.checkpoint import checkpoint
    x = checkpoint(block, x, use_reentrant=True)  # before

    import transformer_engine.pytorch as te
    x = te.checkpoint(block, x)                   # after

For wrappers: `checkpoint_wrapper(block, checkpoint_fn=te.checkpoint)`. Or open the autocast inside the
checkpointed function. Ignore it if your function does so in a way that fp8doctor does not see. It looks where
the autocast opens, and counts a step's FP8 matmuls: one per layer in the forward, one in the recompute, one
per gradient. If it cannot tell, the finding is information.

With delayed scaling, each recompute of `te.checkpoint` moves the amax history on once more. It then holds
fewer steps than `amax_history_len` (read in Transformer Engine 2.4 to August 2026). Current scaling keeps no
history.
https://github.com/NVIDIA/TransformerEngine/issues/776
https://github.com/NVIDIA/TransformerEngine/issues/415
https://github.com/NVIDIA/TransformerEngine/pull/3213
"""

from fp8doctor import kit

AROUND_THE_MODEL = "contextual_fp8_autocast"
"""Accelerate's wrapper around the model's forward (1.4 to 1.15, ``utils/transformer_engine.py``)."""

NOT_KNOWN_WHERE = (
    "fp8doctor cannot see where this job opens the autocast. If it is around the forward, the recompute runs "
    "in BF16 or raises."
)


@kit.check("CKP002", "recompute-not-fp8", severity="error", **kit.NO_FP8_STEP)
def recompute_not_fp8(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    te = [each for each in facts.network.fp8 if kit.stack_of(each).under_autocast]
    regions = [(linear, kit.training_bugs.region_of(linear, facts, "torch")) for linear in te]
    inside = [(linear, region) for linear, region in regions if region]
    if not inside:
        return kit.NotApplicable(reason="no Transformer Engine layer is under torch's checkpoint")
    training = facts.training
    failed = kit.recorded(facts, "trial") and kit.no_number.why_of(facts.trial)
    raised = failed == kit.arm_names.Reason.RECOMPUTE_DIFFERS
    missing = kit.own_step.ran_in_bf16_later(facts, [linear for linear, _ in inside])
    affected = inside if missing or raised else [each for each in inside if not each[1].opens_fp8_autocast]
    in_fp8 = missing is False or (training.gradients_seen and all(each.engaged for each, _ in affected))
    if not affected or (in_fp8 and not raised and not missing):
        return None
    first, region = affected[0]
    watched = kit.recorded(facts, "observed")  # its last forward is that of a training step
    in_bf16 = training.gradients_seen is True and all(
        linear.get("features", {}).get("fp8_ran_before") is True
        and (each.reentrant or (watched and each.reentrant is None))
        for linear, each in affected
    )
    in_forward = any(AROUND_THE_MODEL in each for each in training.forward_chain)
    around_it = region.active is True and (in_forward or region.get("fp8_autocast_around") is True)
    by_count, counted = "", dict[str, int | None]()
    if missing:
        gemms = kit.own_step
        ran, due = gemms.counted_gemms(facts), sum(gemms.due_gemms(facts, gemms.all_fp8(facts)))
        counted = {"fp8_gemms": ran, "fp8_gemms_due": due}
        by_count = f"One step ran {ran} of {due} FP8 matmuls: everything after the forward ran in BF16."
    causes = {
        "The step raised CheckpointError: the recompute saved other tensors than the forward.": raised,
        by_count: missing,
        "They ran in FP8 before, but not in their last forward, the backward's recompute.": in_bf16,
        "The autocast is around the forward alone; the recompute runs later, in the backward.": around_it,
    }
    cause = next((words for words, holds in causes.items() if holds), NOT_KNOWN_WHERE)
    known = cause != NOT_KNOWN_WHERE
    state = "not recomputed in FP8" if known else "under a checkpoint that opens no FP8 autocast"
    layers = f"{kit.plural(len(affected), 'Transformer Engine layer')}"
    return kit.Finding(
        severity="error" if known else "info",
        title=f"{layers} {'is' if len(affected) == 1 else 'are'} {state}"
        f"{kit.named([each for each, _ in affected], len(facts.network.fp8))}",
        explanation=cause,
        evidence={
            "layers": len(affected),
            "first": first.name,
            "region": region.name,
            "form": region.form,
            "reentrant": region.reentrant,
            **counted,
        },
        treatment=kit.Treatment(
            name="te-checkpoint",
            summary="recompute with Transformer Engine's checkpoint",
            code=code(facts, region),
        ),
    )


def code(facts: kit.Facts, region: kit.Checkpointing) -> str:
    """Write the lines that replace torch's function by Transformer Engine's, for this form."""
    if region.form == "huggingface":
        return (
            f"for module in {kit.in_python('', facts.network)}.modules():\n"
            "    if hasattr(module, '_gradient_checkpointing_func'):\n"
            "        module._gradient_checkpointing_func = te.checkpoint"
        )
    if region.form == "wrapper":
        return (
            f"for module in {kit.in_python('modules', facts.network)}():   # after your own wrapping\n"
            "    if isinstance(module, CheckpointWrapper):\n"
            "        module.checkpoint_fn = te.checkpoint"
        )
    return "te.checkpoint(function, x)   # instead of torch's"


def _checkpointed(library: str) -> kit.Facts:
    layer = kit.float8("layers.0.up", stack="transformer_engine", checkpointed="layers.0", engaged=None)
    form = {"form": "wrapper", "active": True, "reentrant": False, "opens_fp8_autocast": False}
    region = kit.Checkpointing(name="layers.0", library=library, **form)  # type: ignore[arg-type]
    chain = ("accelerate.utils.transformer_engine.contextual_fp8_autocast.<locals>.forward",)
    of_job = {"wrappers": (), "gradients_seen": False, "checkpointing": (region,), "forward_chain": chain}
    return kit.example(linears=(layer,), **of_job)


FIRES = _checkpointed(library="torch")
SILENT = _checkpointed(library="transformer_engine")
