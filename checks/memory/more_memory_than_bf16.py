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
parameter): without fp32 master weights the model silently stops learning. Compile torchao's layers. Ignore it
if FP8 is faster and you have the memory. Without a measured peak the check estimates what a step holds, from
4 GiB, without attention, norms, logits and temporaries.
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

PARTS = ("weights", "gradients", "optimizer", "activations")  # of `MemoryParts`
ADAMW_8BIT = kit.Treatment(
    name="smaller-optimizer-state",
    summary="keep the optimizer's state in 8 bits: it saves more than FP8 layers can",
    code="from torchao.optim import AdamW8bit\noptimizer = AdamW8bit(model.parameters())",
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
    partly = not compiled and any(linear.compiled is not None for linear in fp8)
    alike = "both under torch.compile" if compiled else "BF16 not compiled" if partly else "both not compiled"
    if bf16 is None or not bf16.peak_gib:
        return kit.NotApplicable(reason="the trial did not measure BF16 in the form of your step")
    extra = now.peak_gib - bf16.peak_gib
    if extra < MORE_GIB or 100 * extra / bf16.peak_gib < MORE_PCT:
        return None
    eager = [linear for linear in fp8 if linear.compiled is None and kit.needs_compile(linear)]
    copies = [linear for linear in fp8 if kit.memory.keeps_copies(linear)]
    parts = {}
    if (one := now.get("memory")) and (other := bf16.get("memory")):
        parts = {name: getattr(one, f"{name}_gib") - getattr(other, f"{name}_gib") for name in PARTS}
    more = [f"{name} {gib:+.1f} GiB" for name, gib in parts.items() if gib >= SHOWN_GIB]
    why = f" The difference: {', '.join(more)}." if more else ""
    if frozen := sum(linear.requires_grad is False for linear in eager):
        why += f" {kit.plural(frozen, 'frozen torchao layer')} keep inputs for gradients that nobody needs."
    if copies:
        layers = kit.plural(len(copies), f"{kit.stack_of(copies[0]).in_words} layer")
        why += f" {layers} hold FP8 weights too: up to {kit.memory.copies_gib(facts, copies):.1f} GiB."
    return kit.Finding(
        title=f"FP8 takes {round(now.peak_gib, 1) - round(bf16.peak_gib, 1):.1f} GiB more than BF16, {alike}",
        explanation=f"The step peaks at {now.peak_gib:.1f} GiB, in BF16 at {bf16.peak_gib:.1f} GiB.{why}",
        evidence={"peak_gib": now.peak_gib, "bf16_peak_gib": bf16.peak_gib, "extra_gib": extra}
        | {f"extra_{name}_gib": gib for name, gib in parts.items()}
        | {"compared_with": bf16.name},
        treatment=kit.compile_coverage.compile_treatment(facts, eager) if eager else None,
    )


@kit.check("MEM001", "memory-ledger", severity="info", was="MEM005", needs_fp8=True)
def memory_ledger(facts: kit.Facts) -> kit.Finding | kit.NotApplicable | None:
    now, fp8 = kit.arms.arm(facts, kit.ArmName.AS_IS), facts.network.fp8
    if now is not None and now.get("peak_gib") is not None:
        return kit.NotApplicable(reason="the trial measured the step's memory")
    optimizer = (facts.get("training.optimizer") or "").rpartition(".")[2]
    memory = kit.memory.estimated_peak(facts) if facts.network.dtypes else None
    if memory is None:
        return kit.NotApplicable(reason=f"fp8doctor does not know what {optimizer} keeps per parameter")
    if max(memory.in_both, memory.fp8_copies) < LEDGER_GIB:
        return None
    what, copies = "copies next to the weights", ""
    if any(map(kit.memory.keeps_transposed, fp8)):
        what = "gathered weights until the backward"
        copies = " Compiled blocks keep transposed copies of weights that FSDP2 gathers, unless checkpointed."
    elif memory.fp8_copies:
        copies = " Transformer Engine keeps FP8 copies of its weights."
    more = f"and FP8 up to {memory.fp8_copies:.1f} GiB more, of {what}"
    if memory.fp8_copies < SHOWN_GIB:
        kept = {kit.recipes.recipe_of(each).granularity for each in fp8 if kit.stack_of(each).keeps_copies}
        more = "the same in BF16 and in FP8" + ", whose weights are kept twice" * ("block" in kept)
    return kit.Finding(
        title=f"Weights, gradients and optimizer take {memory.in_both:.1f} GiB, {more}",
        explanation=f"Estimated: weights {memory.weights:.1f}, gradients {memory.gradients:.1f}, state of "
        f"{optimizer or 'AdamW (assumed)'} {memory.optimizer:.1f} GiB.{copies}",
        evidence={f"{name}_gib": getattr(memory, name) for name in (*PARTS[:-1], "fp8_copies")}
        | {"optimizer": optimizer or None, "fp8_layers": len(fp8)},
        treatment=ADAMW_8BIT
        if optimizer in ("", "Adam", "AdamW") and memory.optimizer > memory.fp8_copies
        else None,
    )


def _llama_8b(**peaks_gib: float) -> kit.Facts:
    """One Transformer Engine layer stands for all; the peaks of variants that were timed."""
    size = {"parameters": 8 * 10**9, "trainable_parameters": 8 * 10**9, "dtypes": {"bfloat16": 8 * 10**9}}
    layer = kit.float8(stack="transformer_engine", in_features=4096, out_features=14336)
    arms = [kit.Arm(name=name, tried=True, peak_gib=gib, graphs_run=0) for name, gib in peaks_gib.items()]
    trial = {"device": "cuda", "arms": tuple(arms)} if arms else {}
    return kit.example(linears=(layer,), blocks=(), tokens=4096, optimizer=None, **size, **trial)


FIRES = (_llama_8b(as_is=22.8, bf16=19.9), _llama_8b())
SILENT = _llama_8b(as_is=19.9, bf16=19.9)
