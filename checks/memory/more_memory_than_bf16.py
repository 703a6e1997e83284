"""FP8 needs more memory than BF16

Weights, gradients and the optimizer's state stay in BF16. Transformer Engine keeps each weight in FP8 too,
twice on Ada, Hopper and 12.x. On an H200, four layers of Llama 8B peaked at 22.8 GiB, BF16 at 19.9. Without
compilation, torchao keeps the inputs of frozen layers for a weight gradient that nobody needs. Of weights
that FSDP2 gathers in FP8, compiled blocks keep whole transposed copies. Checkpoint the blocks, or gather
BF16: `force_recompute_fp8_weight_in_bwd` has had no effect since torchao 0.12.

    model = build_model()  # before: BF16, FP8 and transposed FP8 weights

    import transformer_engine.pytorch as te
    with te.quantized_model_init(enabled=True):  # after (2.9; before: te.fp8_model_init)
        model = build_model()

That is for frozen weights. If you train them, use FusedAdam with `master_weights=True` (4 bytes per
parameter): without fp32 master weights the model silently stops learning. Or keep less of other things:
`LayerNormMLP(checkpoint=True)`, or Adam's state in 8 bits. Compile torchao's layers. Ignore it
if you have the memory. Without a measured peak the check compares estimates: from 5% on this is a cause.
https://github.com/NVIDIA/TransformerEngine/issues/1261
https://github.com/pytorch/ao/pull/936
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from fp8doctor import kit

MORE_PCT = 5.0
"""Extra peak, in percent, that counts. Sound steps on an H200 stay within 0.7; the least real case is 8.4."""

MORE_GIB = 0.25
"""Extra peak, in GiB, that counts: the matmuls' workspaces take 66 MiB in all on an H200."""

SHOWN_GIB = 0.05  # what shows as 0.1
LEDGER_GIB = 4.0
"""Weights, gradients and optimizer: half of the smallest FP8 GPU's 8 GiB. A choice."""

PARTS = ("weights", "gradients", "optimizer", "fp8_copies")  # of an estimated `Peak`
FROZEN_IN_FP8 = kit.Treatment(
    name="frozen-weights-in-fp8",
    summary="build the frozen layers with FP8 weights alone",
    code="import transformer_engine.pytorch as te\n"
    "with te.quantized_model_init(enabled=True):   # te.fp8_model_init before 2.9\n    model = build_model()",
    kind="sketch",
)
FUSED_MLP = "transformer_engine.pytorch.module.layernorm_mlp.LayerNormMLP"
MLP_CHECKPOINTED = kit.Treatment(
    name="mlp-checkpointed",
    summary="let the MLP compute again what its first matmul returned (Transformer Engine 2.11)",
    code="te.LayerNormMLP(hidden_size, 4 * hidden_size, checkpoint=True)   # and your other arguments",
    kind="sketch",
)


@kit.check(
    "MEM001",
    "more-memory-than-bf16",
    severity="warning",
    explained_by=("CMP001", "CMP002"),
    changes_fp8=True,
    needs_fp8=True,
)
def more_memory_than_bf16(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    now = kit.arms.arm(facts, kit.ArmName.AS_IS) if facts.trial else None
    fp8 = facts.network.fp8
    if now is None or now.peak_gib is None:
        return kit.NotApplicable(reason="the trial did not measure the peak of your step")
    compiled = all(linear.compiled is not None for linear in fp8) and now.graphs_run != 0
    forms = (kit.ArmName.BF16_AS_COMPILED, kit.ArmName.BF16_COMPILED) if compiled else (kit.ArmName.BF16,)
    bf16 = next((found for form in forms if (found := kit.arms.arm(facts, form))), None)
    if bf16 is None or not bf16.peak_gib:
        return kit.NotApplicable(reason="the trial did not measure BF16 in the form of your step")
    extra = now.peak_gib - bf16.peak_gib
    if extra < MORE_GIB or 100 * extra / bf16.peak_gib < MORE_PCT:
        return None
    eager = [linear for linear in fp8 if linear.compiled is None and kit.needs_compile(linear)]
    why = f"The step peaks at {now.peak_gib:.1f} GiB, in BF16 at {bf16.peak_gib:.1f} GiB."
    if frozen := sum(linear.requires_grad is False for linear in eager):
        why += f" {kit.plural(frozen, 'frozen torchao layer')} keep inputs for gradients that nobody needs."
    return kit.Finding(
        title=f"FP8 takes {round(now.peak_gib, 1) - round(bf16.peak_gib, 1):.1f} GiB more than "
        f"{'' if compiled else 'un'}compiled BF16",
        explanation=why,
        evidence={"peak_gib": now.peak_gib, "extra_gib": extra, "compared_with": bf16.name},
        explains="memory",
        treatment=kit.compile_coverage.compile_treatment(facts, eager) if eager else lighter(facts, extra),
    )


@kit.check("MEM001", "memory-ledger", severity="info", was="MEM005", changes_fp8=True, needs_fp8=True)
def memory_ledger(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    now, fp8 = kit.arms.arm(facts, kit.ArmName.AS_IS), facts.network.fp8
    if now is not None and now.get("peak_gib") is not None:
        return kit.NotApplicable(reason="the trial measured the step's memory")
    optimizer = (facts.get("training.optimizer") or "").rpartition(".")[2]
    memory = kit.memory.estimated_peak(facts) if facts.network.dtypes else None
    bf16 = memory and kit.memory.estimated_peak(kit.cost.step_cost.in_bf16(facts))
    if memory is None or bf16 is None:
        return kit.NotApplicable(reason=f"fp8doctor does not know what {optimizer} keeps per parameter")
    if max(memory.in_both, memory.fp8_copies) < LEDGER_GIB:
        return None
    extra, what = memory.gib - bf16.gib, "copies next to the weights"
    if any(map(kit.memory.keeps_transposed, fp8)):
        what = "gathered weights until the backward"
    more = f"and FP8 up to {memory.fp8_copies:.1f} GiB more, for {what}"
    if memory.fp8_copies < SHOWN_GIB:
        kept = {kit.recipes.recipe_of(each).granularity for each in fp8 if kit.stack_of(each).keeps_copies}
        more = "the same in BF16 and in FP8" + ", whose weights are kept twice" * ("block" in kept)
    title = f"Weights, gradients and optimizer take {memory.in_both:.1f} GiB, {more}"
    is_heavier = memory.activations is not None and 100 * extra >= MORE_PCT * bf16.gib
    return kit.Finding(
        title=f"FP8 takes {extra:.1f} GiB more than BF16, for {what} (estimated)" if is_heavier else title,
        explanation=f"Estimated: weights {memory.weights:.1f}, gradients {memory.gradients:.1f}, state of "
        f"{optimizer or 'AdamW (assumed)'} {memory.optimizer:.1f} GiB.",
        evidence={f"{name}_gib": getattr(memory, name) for name in PARTS}
        | {"extra_gib": extra, "optimizer": optimizer or None, "fp8_layers": len(fp8)},
        explains="memory" if is_heavier else kit.NOT_RECORDED,
        treatment=lighter(facts, memory.fp8_copies),
    )


def lighter(facts: kit.Facts, extra_gib: float) -> kit.Treatment | None:
    """Choose what changes the training least of what frees about as much."""
    fp8, memory = facts.network.fp8, kit.memory.estimated_peak(facts)
    if all(kit.memory.keeps_copies(each) and each.requires_grad is False for each in fp8):
        return FROZEN_IN_FP8
    if any(each.kind == FUSED_MLP for each in fp8):
        return MLP_CHECKPOINTED
    is_large = memory is not None and memory.optimizer > extra_gib
    return kit.treatments.optimizer_in_8_bits(facts) if is_large else None


def _llama_8b(**peaks_gib: float) -> kit.Facts:
    """One Transformer Engine layer stands for all; the peaks of variants that were timed."""
    size = {"parameters": 8 * 10**9, "trainable_parameters": 8 * 10**9, "dtypes": {"bfloat16": 8 * 10**9}}
    layer = kit.float8(stack="transformer_engine", in_features=4096, out_features=14336)
    arms = [kit.Arm(name=name, tried=True, peak_gib=gib, graphs_run=0) for name, gib in peaks_gib.items()]
    trial = {"device": "cuda", "arms": tuple(arms)} if arms else {}
    return kit.example(linears=(layer,), blocks=(), tokens=4096, optimizer=None, **size, **trial)


FIRES = (_llama_8b(as_is=22.8, bf16=19.9), _llama_8b())
SILENT = _llama_8b(as_is=19.9, bf16=19.9)
