"""FP8 needs more memory than BF16

Looks at: the peak of the step as it is and of its BF16 twin in the same state: both compiled, or
both eager; and what the two are made of: weights, FP8 copies that stay beside them, gradients,
optimizer state, and the rest, which is saved activations and temporaries.

Why it costs time. Memory that FP8 takes is a smaller batch or a checkpointed block. FP8 training
need not take any: torchao keeps BF16 weights and activations, and compiled it saves FP8 copies
where BF16 saves wider ones. Two things make it more. Transformer Engine holds each weight in FP8
beside the BF16 one, twice on Ada, Hopper and compute capability 12.x, whose FP8 GEMMs need the
transposed copy too. Uncompiled torchao keeps the inputs of frozen layers for a weight gradient that
nobody needs. Scales and histories of amax are small. Transformer Engine's copies live from forward
to backward, so they count to the rest; with `is_first_microbatch`, or weights in FP8, they stay
between steps.

What to do. Compile torchao's layers. In Transformer Engine, keep frozen weights in FP8 alone.
Trained weights need fp32 master weights in the optimizer: with an ordinary optimizer the model
stops learning, without an error, because its updates are smaller than FP8's rounding. Master
weights take 4 bytes a parameter, so FP8 weights save memory only if your optimizer already holds
them.

    model = build_model()                          # before: BF16, FP8 and transposed FP8 weights
    with te.quantized_model_init(enabled=True):    # after (te.fp8_model_init before 2.9)
        model = build_model()
    optimizer = te.optimizers.FusedAdam(trained, master_weights=True)   # if they are trained

Evidence: peaks on one H200 (torch 2.11, torchao 0.18, TE 2.20), in GiB. 468 M decoder: eager 24.7
and BF16 24.7, compiled 17.2 and BF16 21.7. LoRA on Llama 1B: eager 38.4 and BF16 35.4, compiled
29.5 and BF16 29.5. TE, four layers of Llama 8B: 22.8 and BF16 19.9.
One `te.Linear` with FP8 weights on an H100 (TE 2.20, lr 1e-4): its loss stays at 1.51 with AdamW
and falls from 1.53 to 0.28 in 400 steps with FusedAdam and master weights.
https://github.com/NVIDIA/TransformerEngine/issues/1261
https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.analysis.arms import arm, uses_fp8
from fp8doctor.analysis.compile_coverage import compile_treatment, needs_compile
from fp8doctor.analysis.fp8_request import may_have_converted
from fp8doctor.analysis.memory import (
    copies_gib,
    frozen_fp8_weights,
    holds_master_weights,
    keeps_copies,
    trained_fp8_weights,
)
from fp8doctor.analysis.outcome import measured_speed
from fp8doctor.facts import Arm, Facts, Linear, Network, Trial, Workload, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import plural

MORE_PCT = 5.0
"""Extra peak, in per cent, that counts. Healthy rows measured on an H200 stay within 0.7 (eager torchao 14.6
to 14.5 GiB) and a peak at full depth is predicted within 1; the least of the sick ones is 8.4 (LoRA on eager
torchao)."""

MORE_GIB = 0.25
"""Extra peak, in GiB, that counts: the workspaces of the FP8 GEMMs do not (32 MiB each, 66 MiB in all on an
H200)."""

SHOWN_GIB = 0.05
"""Difference of one part, in GiB, that is worth a word: what shows as 0.1."""

IN_WORDS = {
    "weights": "weights",
    "fp8_copies": "FP8 copies kept beside them",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations and temporaries",
}
"""The parts of `MemoryParts`."""


@check(
    "MEM001", "more-memory-than-bf16", area="memory", severity="warning", explained_by=("CMP001", "CMP002")
)
def more_memory_than_bf16(facts: Facts) -> Finding | NotApplicable | None:
    if not uses_fp8(facts):
        return NotApplicable(reason="no layer is set up for FP8 training")
    now = arm(facts.trial, ArmName.AS_IS)
    if now is None or now.peak_gib is None:
        return NotApplicable(reason="the peak of the step as it is was not measured, which takes a GPU")
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    eager = [linear for linear in fp8 if linear.compiled is None]
    compiled = not eager and now.graphs_run != 0
    forms = (ArmName.BF16_AS_COMPILED, ArmName.BF16_COMPILED) if compiled else (ArmName.BF16,)
    bf16 = next((found for form in forms if (found := arm(facts.trial, form))), None)
    if bf16 is None or not bf16.peak_gib:
        return NotApplicable(
            reason=f"BF16 was not measured {'compiled' if compiled else 'eagerly'}, as the step is"
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
    parts = parts_of(now, bf16)
    where = (
        f" {static:.1f} GiB of it are weights, buffers and optimizer state, the rest lives within the step."
        if static is not None
        else ""
    )
    where = excess_in_words(parts) if parts else where
    frozen = [linear for linear in eager if needs_compile(linear) and linear.requires_grad is False]
    copies = [linear for linear in fp8 if keeps_copies(linear)]
    change = treatment(facts, [linear for linear in eager if needs_compile(linear)], copies, now)
    speed = if_recorded(measured_speed, facts)
    faster = speed is not None and speed.status == "fp8_faster"
    return Finding(
        severity="info" if faster and change and change.name == "fp8-weights" else None,
        title=f"FP8 takes {extra:.1f} GiB more than BF16",
        explanation=f"The step peaks at {now.peak_gib:.1f} GiB, in BF16, "
        f"{'compiled' if compiled else 'eager'} as "
        f"well, at {bf16.peak_gib:.1f}.{where}{causes_in_words(facts, frozen, copies)}",
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


def causes_in_words(facts: Facts, frozen: list[Linear], copies: list[Linear]) -> str:
    """Say what keeps more than BF16 does, as sentences to add."""
    causes = ""
    if frozen:
        causes += (
            f" {plural(len(frozen), 'frozen layer')} of torchao keep their input for a weight gradient that "
            "nobody needs."
        )
    if copies:
        causes += (
            f" {plural(len(copies), 'layer')} of Transformer Engine hold FP8 weights beside the BF16 ones: "
            f"up to {copies_gib(facts, copies):.1f} GiB."
        )
        if any(linear.requires_grad for linear in copies):
            causes += " FP8 weights alone need fp32 master weights in the optimizer, 4 bytes a parameter."
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
    """Compare the parts of both peaks, the one where FP8 takes most in excess first; empty where they were
    not recorded."""
    one, other = (arm.memory if recorded(arm, "memory") else None for arm in (fp8, bf16))
    if one is None or other is None:
        return ()
    parts = [Part(name, getattr(one, f"{name}_gib"), getattr(other, f"{name}_gib")) for name in IN_WORDS]
    return tuple(sorted(parts, key=lambda part: -part.extra))


def excess_in_words(parts: tuple[Part, ...]) -> str:
    """Say where the extra memory is, as far as it shows in a tenth of a GiB."""
    more = [f"{part.extra:+.1f} GiB {IN_WORDS[part.name]}" for part in parts if part.extra >= SHOWN_GIB]
    less = [
        f"{part.extra:+.1f} GiB {IN_WORDS[part.name]}" for part in reversed(parts) if part.extra <= -SHOWN_GIB
    ]
    return f" The difference: {', '.join(more + less)}." if more or less else ""


def treatment(facts: Facts, eager: list[Linear], copies: list[Linear], now: Arm) -> Treatment | None:
    """Compile what is eager; else propose FP8 weights where they save memory; None when nothing is known
    to.

    Accelerate copies weights into the layers that it makes, so their first value is not the model's.
    """
    if eager:
        return compile_treatment(facts, eager)
    if not copies or if_recorded(may_have_converted, facts):
        return None
    if not any(linear.requires_grad for linear in copies):
        return frozen_fp8_weights(copies)
    return trained_fp8_weights(copies, facts) if holds_master_weights(now, facts) else None


def _four_layers_of_llama_8b(peak_gib: float) -> Facts:
    """Transformer Engine through Accelerate, eager, as measured on an H200."""
    layer = Linear(
        name="layers.0.up",
        stack="transformer_engine",
        use="training",
        in_features=4096,
        out_features=14336,
        requires_grad=True,
        compiled=None,
    )
    arms = tuple(
        Arm(name=name, tried=True, peak_gib=gib, graphs_run=0)
        for name, gib in ((ArmName.AS_IS, peak_gib), (ArmName.BF16, 19.9))
    )
    return Facts(
        network=Network(linears=(layer,), blocks=()),
        workload=Workload(tokens=4096),
        trial=Trial(device="cuda", arms=arms),
    )


SICK = _four_layers_of_llama_8b(peak_gib=22.8)
HEALTHY = _four_layers_of_llama_8b(peak_gib=19.9)
