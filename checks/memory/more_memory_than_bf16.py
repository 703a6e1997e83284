"""FP8 needs more memory than BF16

More memory is a smaller batch or a checkpointed block, and FP8 training need not take more. Weights,
gradients and the optimizer's state stay in BF16 (8 bytes per parameter with AdamW). Transformer Engine keeps
each weight in FP8 too, twice on Ada, Hopper and 12.x. On an H200, four layers of Llama 8B peaked at 22.8 GiB,
BF16 at 19.9. Without compilation, torchao keeps the inputs of frozen layers for a weight gradient that nobody
needs. Compiled, it saves up to half of the inputs.

    model = build_model()  # before: BF16, FP8 and transposed FP8 weights

    import transformer_engine.pytorch as te
    with te.quantized_model_init(enabled=True):  # after (2.9; before: te.fp8_model_init)
        model = build_model()

That is for frozen weights. If you train them, use FusedAdam with `master_weights=True` (4 bytes per
parameter): without fp32 master weights the model silently stops learning. Compile torchao's layers.

Ignore it if FP8 is faster and you have the memory. Without a measured peak this check estimates what a step
holds, from 4 GiB; attention, norms, logits and temporaries are not counted. If memory is short, reduce the
large parts: the optimizer's state (`AdamW8bit`), or activations by checkpointing.
https://github.com/NVIDIA/TransformerEngine/issues/1261
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from __future__ import annotations

from fp8doctor import kit
from fp8doctor.kit import (
    Arm,
    ArmName,
    Facts,
    Finding,
    Linear,
    NotApplicable,
    Treatment,
    check,
    float8,
    plural,
)

MORE_PCT = 5.0
"""Extra peak, in percent, that counts. Sound steps on an H200 stay within 0.7 (torchao, not compiled: 14.6 to
14.5 GiB); a predicted peak at full depth is within 1; the smallest real case is 8.4 (LoRA, not compiled)."""

MORE_GIB = 0.25
"""Extra peak, in GiB, that counts: the matmuls' workspaces take 66 MiB in all on an H200."""

SHOWN_GIB = 0.05
"""GiB of one part that are worth a word: what shows as 0.1."""

LEDGER_GIB = 4.0
"""Weights, gradients and optimizer: half of the smallest FP8 GPU's 8 GiB. A choice."""

PARTS = {
    "weights": "weights",
    "fp8_copies": "FP8 copies of weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations and temporaries",
}
"""The parts of `MemoryParts`."""

ADAMW_8BIT = Treatment(
    name="smaller-optimizer-state",
    summary="keep the optimizer's state in 8 bits: it saves more than FP8 layers can",
    code="from torchao.optim import AdamW8bit\noptimizer = AdamW8bit(model.parameters())",
)


@check(
    "MEM001",
    "more-memory-than-bf16",
    area="memory",
    severity="warning",
    explained_by=("CMP001", "CMP002"),
    changes_fp8=True,
)
def more_memory_than_bf16(facts: Facts) -> Finding | NotApplicable | None:
    if not kit.uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    now, fp8 = kit.arm(facts.trial, ArmName.AS_IS), facts.network.fp8
    if now is None or now.peak_gib is None:
        return NotApplicable(reason="the trial did not measure the step's peak, which needs a GPU")
    compiled = all(linear.compiled is not None for linear in fp8) and now.graphs_run != 0
    forms = (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED) if compiled else (ArmName.BF16,)
    bf16 = next((found for form in forms if (found := kit.arm(facts.trial, form))), None)
    alike = "compiled" if compiled else "not compiled"
    if bf16 is None or not bf16.peak_gib:
        return NotApplicable(reason=f"the trial did not measure BF16 {alike}, like your step")
    extra = now.peak_gib - bf16.peak_gib
    if extra < MORE_GIB or 100 * extra / bf16.peak_gib < MORE_PCT:
        return None
    eager = [linear for linear in fp8 if linear.compiled is None and kit.needs_compile(linear)]
    copies = [linear for linear in fp8 if kit.keeps_copies(linear)]
    change, faster = treatment(facts, eager, copies, now), kit.if_recorded(kit.is_faster, facts)
    parts = parts_of(now, bf16)
    return Finding(
        severity="info" if faster and change and change.name == "fp8-weights" else None,
        title=f"FP8 takes {more_in_words(extra, now.peak_gib, compiled, facts)}",
        explanation=f"The step peaks at {now.peak_gib:.1f} GiB; in BF16, also {alike}, at "
        f"{bf16.peak_gib:.1f} GiB.{parts_in_words(parts)}{causes(facts, eager, copies)}",
        evidence={
            "peak_gib": now.peak_gib,
            "bf16_peak_gib": bf16.peak_gib,
            "extra_gib": extra,
            "extra_pct": 100 * extra / bf16.peak_gib,
            **{f"extra_{name}_gib": gib for name, gib in parts.items()},
            "compared_with": bf16.name,
        },
        treatment=change,
    )


def more_in_words(extra: float, peak_gib: float, compiled: bool, facts: Facts) -> str:
    """Compare with the best BF16, as every other line does, and with BF16 compiled alike."""
    best = kit.if_recorded(kit.best_bf16, facts)
    best_gib = best.get("peak_gib") if best else None
    over_best = peak_gib - best_gib if best_gib else extra
    alike = "both are compiled" if compiled else "neither is compiled"
    if f"{over_best:.1f}" == f"{extra:.1f}":
        return f"{extra:.1f} GiB more than BF16"
    if over_best <= 0:
        return f"{extra:.1f} GiB more than BF16 if {alike}"
    return f"{over_best:.1f} GiB more than BF16 ({extra:.1f} if {alike})"


def parts_of(fp8: Arm, bf16: Arm) -> dict[str, float]:
    """Compare the parts of both peaks in GiB, the largest excess of FP8 first; empty if not recorded."""
    one, other = fp8.get("memory"), bf16.get("memory")
    if one is None or other is None:
        return {}
    extra = {name: getattr(one, f"{name}_gib") - getattr(other, f"{name}_gib") for name in PARTS}
    return dict(sorted(extra.items(), key=lambda part: -part[1]))


def parts_in_words(parts: dict[str, float]) -> str:
    shown = [f"{gib:+.1f} GiB {PARTS[name]}" for name, gib in parts.items() if abs(gib) >= SHOWN_GIB]
    return f" The difference: {', '.join(shown)}." if shown else ""


def causes(facts: Facts, eager: list[Linear], copies: list[Linear]) -> str:
    """Say what keeps more than BF16 does, as sentences to add."""
    frozen, said = sum(linear.requires_grad is False for linear in eager), ""
    if frozen:
        said = f" {plural(frozen, 'frozen torchao layer')} keep their input for a gradient that nobody needs."
    if copies:
        said += f" {plural(len(copies), f'{kit.stack_of(copies[0]).in_words} layer')} hold FP8 weights in "
        said += f"addition to BF16: up to {kit.copies_gib(facts, copies):.1f} GiB."
    if any(linear.requires_grad for linear in copies):
        said += " FP8 weights alone need fp32 master weights in the optimizer, 4 bytes per parameter."
    return said


def treatment(facts: Facts, eager: list[Linear], copies: list[Linear], now: Arm) -> Treatment | None:
    """Compile the layers, else propose FP8 weights; None if unknown, or if Accelerate copies the weights."""
    if eager:
        return kit.compile_treatment(facts, eager)
    if not copies or kit.if_recorded(kit.may_have_converted, facts):
        return None
    if not any(linear.requires_grad for linear in copies):
        return kit.frozen_fp8_weights(copies)
    return kit.trained_fp8_weights(copies, facts) if kit.holds_master_weights(now, facts) else None


@check("MEM001", "memory-ledger", area="memory", severity="info", was="MEM005")
def memory_ledger(facts: Facts) -> Finding | NotApplicable | None:
    now, fp8 = kit.arm_if_any(facts, ArmName.AS_IS), facts.network.fp8
    if not fp8 or (now is not None and now.get("peak_gib") is not None):
        return NotApplicable(reason="the trial measured the step's memory" if fp8 else "no layer is in FP8")
    optimizer, states = (
        (facts.get("training.optimizer") or "").rpartition(".")[2],
        kit.optimizer_states(facts),
    )
    if states is None:
        return NotApplicable(reason=f"fp8doctor does not know what {optimizer} keeps per parameter")
    memory = kit.memory_of(facts, fp8, states)
    if memory.in_both < LEDGER_GIB:
        return None
    inputs, more = memory.linear_inputs, f"FP8 keeps up to {memory.fp8_copies:.1f} GiB more"
    amount = f"{inputs:.1f} GiB" if inputs and inputs >= SHOWN_GIB else "under 0.05 GiB"
    copies = "Transformer Engine holds FP8 copies of weights until the backward." if memory.fp8_copies else ""
    layers = f"Its layers keep {amount} of inputs in BF16; FP8 saves at most half of them."
    if inputs is None:
        layers = "The size of its layers' inputs is unknown, because their rows were not counted."
    return Finding(
        title=f"Weights, gradients and optimizer take {memory.in_both:.1f} GiB, "
        f"{f'and {more}' if memory.fp8_copies >= SHOWN_GIB else 'the same in BF16 and in FP8'}",
        explanation=f"Estimated: weights {memory.weights:.1f}, gradients {memory.gradients:.1f}, state of "
        f"{optimizer or 'AdamW (assumed)'} {memory.optimizer:.1f} GiB. {layers} {copies}".rstrip(),
        evidence={f"{name}_gib": gib for name, gib in memory._asdict().items()}
        | {"optimizer": optimizer or None, "fp8_layers": len(fp8)},
        treatment=ADAMW_8BIT if states == kit.STATES["AdamW"] else None,
    )


def _llama_8b(parameters: int = 8_030_261_248, **peaks_gib: float) -> Facts:
    """One Transformer Engine layer stands for all; the peaks of variants that were timed."""
    counts = {
        "parameters": parameters,
        "trainable_parameters": parameters,
        "dtypes": {"bfloat16": parameters},
    }
    arms = tuple(Arm(name=name, tried=True, peak_gib=gib, graphs_run=0) for name, gib in peaks_gib.items())
    layer = float8(stack="transformer_engine", in_features=4096, out_features=14336)
    trial = {"device": "cuda", "arms": arms} if arms else {}
    return kit.example(linears=(layer,), blocks=(), tokens=4096, optimizer=None, **counts, **trial)


FIRES = (_llama_8b(as_is=22.8, bf16=19.9), _llama_8b())
SILENT = _llama_8b(as_is=19.9, bf16=19.9)
