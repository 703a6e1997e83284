"""FP8 needs more memory than BF16

What it finds. The FP8 step's memory peak is at least 5% and 0.25 GiB above the BF16 step's, compiled alike.

Why it matters. That memory is a smaller batch or a checkpointed block. FP8 training need not take more. Two
things cause it. Transformer Engine holds each weight in FP8 in addition to BF16, twice on Ada, Hopper and
12.x, whose FP8 matmuls need the transposed copy. torchao without compilation keeps the inputs of frozen
layers for a weight gradient that nobody needs. Four layers of Llama 8B in Transformer Engine peaked at 22.8
GiB on an H200, BF16 at 19.9.

Fix. Compile torchao's layers. In Transformer Engine, keep frozen weights in FP8 alone (2.9 or newer; before:
`te.fp8_model_init`). If you train them, use FusedAdam with `master_weights=True` (4 bytes per parameter):
without fp32 master weights the model silently stops learning.

    model = build_model()  # before: BF16, FP8 and transposed FP8 weights

    import transformer_engine.pytorch as te
    with te.quantized_model_init(enabled=True):  # after
        model = build_model()

When to ignore it. If FP8 is faster and you have the memory. FP8 weights save memory only if your optimizer
already holds master weights.

How it is detected, and limits. The trial measures both peaks and what they consist of. Transformer Engine's
copies live from forward to backward, so they count as temporaries, unless `is_first_microbatch` or FP8
weights keep them between steps.

References. H200, GiB (torch 2.11, torchao 0.18, TE 2.20), FP8 and BF16: 468M decoder 24.7 and 24.7, compiled
17.2 and 21.7; LoRA on Llama 1B 38.4 and 35.4, compiled 29.5 and 29.5. One te.Linear with FP8 weights: its
loss stays at 1.51 with AdamW, and falls from 1.53 to 0.28 with master weights.
https://github.com/NVIDIA/TransformerEngine/issues/1261
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.analysis.arms import arm, best_bf16, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.fp8_request import may_have_converted
from fp8doctor.analysis.fp8_weights import (
    copies_gib,
    frozen_fp8_weights,
    holds_master_weights,
    keeps_copies,
    trained_fp8_weights,
)
from fp8doctor.analysis.outcome import is_faster
from fp8doctor.facts import Arm, ArmName, Facts, Linear, if_recorded, recorded
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.recipes import stack_of
from fp8doctor.registry import check
from fp8doctor.wording import plural

MORE_PCT = 5.0
"""Extra peak, in percent, that counts. Sound steps on an H200 stay within 0.7 (torchao, not compiled: 14.6 to
14.5 GiB); a predicted peak at full depth is within 1; the smallest real case is 8.4 (LoRA, not compiled)."""

MORE_GIB = 0.25
"""Extra peak, in GiB, that counts: the matmuls' workspaces take 66 MiB in all on an H200."""

SHOWN_GIB = 0.05
"""Difference of one part, in GiB, that is worth a word: what shows as 0.1."""

IN_WORDS = {
    "weights": "weights",
    "fp8_copies": "FP8 copies of weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations and temporaries",
}
"""The parts of `MemoryParts`."""


@check(
    "MEM001",
    "more-memory-than-bf16",
    area="memory",
    severity="warning",
    explained_by=("CMP001", "CMP002"),
    changes_fp8=True,
)
def more_memory_than_bf16(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    now = arm(facts.trial, ArmName.AS_IS)
    if now is None or now.peak_gib is None:
        return NotApplicable(reason="the trial did not measure the step's peak, which needs a GPU")
    fp8 = facts.network.fp8
    eager = [linear for linear in fp8 if linear.compiled is None]
    compiled = not eager and now.graphs_run != 0
    forms = (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED) if compiled else (ArmName.BF16,)
    bf16 = next((found for form in forms if (found := arm(facts.trial, form))), None)
    if bf16 is None or not bf16.peak_gib:
        return NotApplicable(
            reason=f"the trial did not measure BF16 {'compiled' if compiled else 'without compilation'}, "
            "like your step"
        )
    extra = now.peak_gib - bf16.peak_gib
    if extra < MORE_GIB or 100 * extra / bf16.peak_gib < MORE_PCT:
        return None
    known = recorded(now, "static_gib") and recorded(bf16, "static_gib")
    static = (
        now.static_gib - bf16.static_gib
        if known and now.static_gib is not None and bf16.static_gib is not None
        else None
    )
    parts, best = parts_of(now, bf16), if_recorded(best_bf16, facts)
    where = (
        f" Of this, {static:.1f} GiB are weights, buffers and optimizer state; the rest lives within the "
        "step."
        if static is not None
        else ""
    )
    where = excess_in_words(parts) if parts else where
    frozen = [linear for linear in eager if needs_compile(linear) and linear.requires_grad is False]
    copies = [linear for linear in fp8 if keeps_copies(linear)]
    change = treatment(facts, [linear for linear in eager if needs_compile(linear)], copies, now)
    faster = if_recorded(is_faster, facts)
    return Finding(
        severity="info" if faster and change and change.name == "fp8-weights" else None,
        title=f"FP8 takes {_more_in_words(extra, best, now.peak_gib, compiled=compiled)}",
        explanation=f"The step peaks at {now.peak_gib:.1f} GiB; in BF16, also {'' if compiled else 'not '}"
        f"compiled, at {bf16.peak_gib:.1f} GiB.{where}{causes_in_words(facts, frozen, copies)}",
        evidence={
            "peak_gib": now.peak_gib,
            "bf16_peak_gib": bf16.peak_gib,
            "extra_gib": extra,
            "extra_pct": 100 * extra / bf16.peak_gib,
            "extra_static_gib": static,
            "extra_in_the_step_gib": extra - static if static is not None else None,
            **{key: value for part in parts for key, value in part.evidence.items()},
            "compared_with": bf16.name,
            "frozen_eager_linears": len(frozen),
            "linears_with_fp8_copies": len(copies),
            "fp8_copies_gib": copies_gib(facts, copies) if copies else None,
        },
        treatment=change,
    )


def _more_in_words(extra: float, best: Arm | None, peak_gib: float, *, compiled: bool) -> str:
    """Compare with the best BF16, as every other line does, and with BF16 compiled alike."""
    best_gib = best.get("peak_gib") if best else None
    over_best = peak_gib - best_gib if best_gib else extra
    alike = "both are compiled" if compiled else "neither is compiled"
    if f"{over_best:.1f}" == f"{extra:.1f}":
        return f"{extra:.1f} GiB more than BF16"
    if over_best <= 0:
        return f"{extra:.1f} GiB more than BF16 if {alike}"
    return f"{over_best:.1f} GiB more than BF16 ({extra:.1f} if {alike})"


def causes_in_words(facts: Facts, frozen: list[Linear], copies: list[Linear]) -> str:
    """Say what keeps more than BF16 does, as sentences to add."""
    causes = ""
    if frozen:
        causes += (
            f" {plural(len(frozen), 'frozen torchao layer')} keep their input for a weight gradient that "
            "nobody needs."
        )
    if copies:
        causes += (
            f" {plural(len(copies), f'{stack_of(copies[0]).in_words} layer')} hold FP8 weights in addition "
            f"to BF16: up to {copies_gib(facts, copies):.1f} GiB."
        )
        if any(linear.requires_grad for linear in copies):
            causes += " FP8 weights alone need fp32 master weights in the optimizer, 4 bytes per parameter."
    return causes


class Part(NamedTuple):
    """One part of both peaks, in GiB."""

    name: str
    fp8: float
    bf16: float

    @property
    def extra(self) -> float:
        return self.fp8 - self.bf16

    @property
    def evidence(self) -> dict[str, float]:
        return {
            f"extra_{self.name}_gib": self.extra,
            f"as_is_{self.name}_gib": self.fp8,
            f"bf16_{self.name}_gib": self.bf16,
        }


def parts_of(fp8: Arm, bf16: Arm) -> tuple[Part, ...]:
    """Compare the parts of both peaks, the largest excess of FP8 first; empty if not recorded."""
    one, other = (arm.get("memory") for arm in (fp8, bf16))
    if one is None or other is None:
        return ()
    parts = [Part(name, getattr(one, f"{name}_gib"), getattr(other, f"{name}_gib")) for name in IN_WORDS]
    return tuple(sorted(parts, key=lambda part: -part.extra))


def excess_in_words(parts: tuple[Part, ...]) -> str:
    """Say where the extra memory is, in tenths of a GiB."""
    more = [f"{part.extra:+.1f} GiB {IN_WORDS[part.name]}" for part in parts if part.extra >= SHOWN_GIB]
    less = [
        f"{part.extra:+.1f} GiB {IN_WORDS[part.name]}" for part in reversed(parts) if part.extra <= -SHOWN_GIB
    ]
    return f" The difference: {', '.join(more + less)}." if more or less else ""


def treatment(facts: Facts, eager: list[Linear], copies: list[Linear], now: Arm) -> Treatment | None:
    """Compile the layers, else propose FP8 weights; None if unknown, or if Accelerate copies the weights."""
    if eager:
        return compile_treatment(facts, eager)
    if not copies or if_recorded(may_have_converted, facts):
        return None
    if not any(linear.requires_grad for linear in copies):
        return frozen_fp8_weights(copies)
    return trained_fp8_weights(copies, facts) if holds_master_weights(now, facts) else None


def _four_layers_of_llama_8b(peak_gib: float) -> Facts:
    """Transformer Engine through Accelerate, not compiled, as measured on an H200."""
    peaks = {ArmName.AS_IS: peak_gib, ArmName.BF16: 19.9}
    arms = tuple(Arm(name=name, tried=True, peak_gib=gib, graphs_run=0) for name, gib in peaks.items())
    layer = float8(stack="transformer_engine", in_features=4096, out_features=14336)
    return example(linears=(layer,), blocks=(), tokens=4096, device="cuda", arms=arms)


FIRES = _four_layers_of_llama_8b(peak_gib=22.8)
SILENT = _four_layers_of_llama_8b(peak_gib=19.9)
