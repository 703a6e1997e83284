"""What a step holds in memory, in BF16 and in FP8

What it finds. An estimate of weights, gradients, optimizer state and FP8 copies, for a step whose memory was
not measured (MEM001 covers measured steps).

Why it matters. FP8 training is about speed. The weights stay in BF16, because the optimizer updates them. So
do gradients and optimizer state, which are most of the memory: 8 bytes per parameter with AdamW in BF16, 16
in fp32. In torchao, a step keeps no FP8 weight between forward and backward that it could not recompute.
Transformer Engine keeps each FP8 weight until the backward, and on Ada, Hopper and 12.x its transpose too.
That is 1 or 2 bytes per weight more than BF16. FP8 can save at most half of the inputs that layers keep for
their weight gradients; torchao without compilation saves none.

Fix. If memory is short, reduce the large parts: the optimizer's state, or activations by checkpointing
(slower).

    import torch
    optimizer = torch.optim.AdamW(model.parameters())  # before: 4 bytes per BF16 parameter

    from torchao.optim import AdamW8bit
    optimizer = AdamW8bit(model.parameters())          # after: 2 bytes per parameter

When to ignore it. If the step fits: this is only information.

How it is detected, and limits. fp8doctor adds up the parameters by dtype, the trained ones, the optimizer
(AdamW if unknown) and the FP8 layers' rows. Nothing runs. It reports from 4 GiB. Attention, norms, logits and
temporaries are not counted.

References. On an H200 (Transformer Engine 2.20, 403M and 618M parameters) weights, gradients and optimizer
were right within 0.1%; FP8 took 0.69 and 1.00 GiB more than BF16, the copies are 0.75 and 1.00.
https://github.com/NVIDIA/TransformerEngine/issues/1261
"""

from __future__ import annotations

from fp8doctor.analysis.arms import arm_if_any
from fp8doctor.analysis.memory import LEAST_GIB, STATES, memory_of, optimizer_states
from fp8doctor.facts import ArmName, Facts
from fp8doctor.facts.examples import example, float8
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

REPORTED_FROM_GIB = 4.0
"""Weights, gradients and optimizer: half of the smallest FP8 GPU's 8 GiB. A choice."""


@check("MEM005", "memory-ledger", area="memory", severity="info")
def memory_ledger(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = facts.network.fp8
    if not fp8:
        return NotApplicable(reason="no layer is set up for FP8 training")
    if was_measured(facts):
        return NotApplicable(reason="the trial measured the step's memory (MEM001)")
    known = facts.get("training.optimizer")
    optimizer = known.rpartition(".")[2] if known else None
    states = optimizer_states(facts)
    if states is None:
        return NotApplicable(reason=f"fp8doctor does not know what {optimizer} keeps per parameter")
    memory = memory_of(facts, fp8, states)
    if memory.in_both < REPORTED_FROM_GIB:
        return None
    copies = (
        f"Transformer Engine holds FP8 copies of up to {memory.fp8_copies:.1f} GiB until the backward"
        if memory.fp8_copies
        else "FP8 keeps no additional copy of a weight"
    )
    more = (
        f", and FP8 keeps up to {memory.fp8_copies:.1f} GiB more"
        if memory.fp8_copies >= LEAST_GIB
        else ", the same in BF16 and in FP8"
    )
    return Finding(
        title=f"Weights, gradients and optimizer take {memory.in_both:.1f} GiB{more}",
        explanation=f"Estimated: weights {memory.weights:.1f}, gradients {memory.gradients:.1f}, state of "
        f"{optimizer or 'AdamW (assumed)'} {memory.optimizer:.1f} GiB. {copies}. "
        f"{inputs_in_words(memory.linear_inputs)}",
        evidence={
            "weights_gib": memory.weights,
            "gradients_gib": memory.gradients,
            "optimizer_gib": memory.optimizer,
            "fp8_copies_gib": memory.fp8_copies,
            "linear_inputs_gib": memory.linear_inputs,
            "optimizer": optimizer,
            "fp8_layers": len(fp8),
        },
        treatment=Treatment(
            name="smaller-optimizer-state",
            summary="keep the optimizer's state in 8 bits: it saves more than FP8 layers can",
            code="from torchao.optim import AdamW8bit\noptimizer = AdamW8bit(model.parameters())",
        )
        if states == STATES["AdamW"]
        else None,
    )


def inputs_in_words(gib: float | None) -> str:
    """Say what FP8 can save of the inputs that layers keep."""
    if gib is None:
        return "The size of its layers' inputs is unknown, because their rows were not counted."
    amount = f"{gib:.1f} GiB" if gib >= LEAST_GIB else "under 0.05 GiB"
    return f"Its layers keep {amount} of inputs in BF16; FP8 saves at most half of them."


def was_measured(facts: Facts) -> bool:
    """Whether the peak of the step as it is was measured on a GPU."""
    now = arm_if_any(facts, ArmName.AS_IS)
    return now is not None and now.get("peak_gib") is not None


def _llama(parameters: int) -> Facts:
    """One Transformer Engine layer stands for all."""
    counts = {
        "parameters": parameters,
        "trainable_parameters": parameters,
        "dtypes": {"bfloat16": parameters},
    }
    layer = float8(stack="transformer_engine", in_features=4096, out_features=14336)
    return example(linears=(layer,), **counts, optimizer=None, tokens=4096)


FIRES = _llama(8_030_261_248)
SILENT = _llama(100_000_000)
