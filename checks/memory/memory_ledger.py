"""What a step holds in memory, in BF16 and in FP8

Looks at: the parameters by dtype, what of them is trained, the optimizer, and the FP8 layers with
the rows that they multiply. Nothing is run. A step that was measured has its own numbers: MEM001.

What it means. FP8 training is about speed. The weights stay in BF16, because the optimizer updates
them, and so do their gradients and the optimizer's state, which is most of the memory: 8 bytes a
parameter with AdamW in BF16, 16 in fp32. torchao keeps no FP8 weight between forward and backward
that it could not make again. Transformer Engine keeps each FP8 weight until the backward, and on
Ada, Hopper and 12.x its transpose too: 1 or 2 bytes a weight more than BF16. What FP8 can save are
the inputs that layers keep for their weight gradients, at most half of them; uncompiled torchao
saves none. So "FP8 needs as much memory" is no fault.

What to do. Where memory is short, take it from what is large: the optimizer's state, or activations
by checkpointing, which is dearer.

    optimizer = torch.optim.AdamW(model.parameters())       # before: 4 bytes a BF16 parameter
    from torchao.optim import AdamW8bit                     # after: 2 bytes a parameter
    optimizer = AdamW8bit(model.parameters())

It is information, told from 4 GiB on. Without an optimizer AdamW is assumed. Attention, norms,
logits and temporaries are not counted.

Evidence: weights, gradients and optimizer of the ledger are those measured on an H200 within 0.1 %
(Transformer Engine 2.20, 403 M and 618 M parameters: 0.75, 0.75 and 1.50 GiB; 1.15, 1.15 and 2.30),
and FP8 took 0.69 and 1.00 GiB more than BF16 where the copies are 0.75 and 1.00.
https://github.com/NVIDIA/TransformerEngine/issues/1261
"""

from __future__ import annotations

from typing import NamedTuple

from fp8doctor.analysis.arms import arm
from fp8doctor.analysis.memory import copies_gib, keeps_copies
from fp8doctor.cost import products_of, rows_of, rows_seen
from fp8doctor.facts import Facts, Linear, Network, Training, Workload, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.finding import Finding, NotApplicable, Treatment
from fp8doctor.registry import check

GIB = 2**30

TOLD_FROM_GIB = 4.0
"""Weights, gradients and optimizer together: half of the 8 GiB of the smallest GPUs with FP8 tensor cores. A
choice."""

LEAST_GIB = 0.05
"""GiB below which a number would be shown as 0.0."""

STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}
"""Class of ``torch.optim`` -> tensors that it keeps of each parameter, in the parameter's dtype, with its
default settings. Source: torch 2.13."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Of one element; every other dtype of a parameter has one."""


class Ledger(NamedTuple):
    """What a step holds, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    fp8_copies: float
    """From the forward to the backward, beside the weights."""
    linear_inputs: float | None
    """Inputs in 16 bits that layers keep for their weight gradients; None where the rows of one, such as of
    experts, are not known."""

    @property
    def in_both(self) -> float:
        """What is the same in BF16 and in FP8."""
        return self.weights + self.gradients + self.optimizer


@check("MEM005", "memory-ledger", area="memory", severity="info", background=True)
def memory_ledger(facts: Facts) -> Finding | NotApplicable | None:
    fp8 = [linear for linear in facts.network.linears if linear.use == "training"]
    if not fp8:
        return NotApplicable(reason="no layer is set up for FP8 training")
    if was_measured(facts):
        return NotApplicable(reason="the memory of the step was measured (MEM001)")
    optimizer = optimizer_of(facts)
    states = STATES.get(optimizer or "AdamW")
    if states is None:
        return NotApplicable(reason=f"what {optimizer} keeps of each parameter is not known")
    ledger = ledger_of(facts, fp8, states)
    if ledger.in_both < TOLD_FROM_GIB:
        return None
    copies = (
        f"Transformer Engine holds FP8 copies of up to {ledger.fp8_copies:.1f} GiB until the backward"
        if ledger.fp8_copies
        else "FP8 keeps no copy of a weight beside it"
    )
    more = (
        f", and FP8 keeps up to {ledger.fp8_copies:.1f} GiB more"
        if ledger.fp8_copies >= LEAST_GIB
        else ", the same in BF16 and in FP8"
    )
    return Finding(
        title=f"Weights, gradients and optimizer take {ledger.in_both:.1f} GiB{more}",
        explanation=f"Weights {ledger.weights:.1f}, gradients {ledger.gradients:.1f}, state of "
        f"{optimizer or 'AdamW (assumed)'} {ledger.optimizer:.1f} GiB, computed. {copies}. "
        f"{inputs_in_words(ledger.linear_inputs)}",
        evidence={
            "weights_gib": ledger.weights,
            "gradients_gib": ledger.gradients,
            "optimizer_gib": ledger.optimizer,
            "fp8_copies_gib": ledger.fp8_copies,
            "linear_inputs_gib": ledger.linear_inputs,
            "optimizer": optimizer,
            "fp8_layers": len(fp8),
        },
        treatment=Treatment(
            name="smaller-optimizer-state",
            summary="keep the optimizer's state in 8 bits, which saves more than FP8 layers can",
            code="from torchao.optim import AdamW8bit\noptimizer = AdamW8bit(model.parameters())",
        )
        if states == STATES["AdamW"]
        else None,
    )


def inputs_in_words(gib: float | None) -> str:
    """Say what FP8 can save of the inputs that its layers keep."""
    if gib is None:
        return "How large the inputs of its layers are is not known: nobody counted their rows."
    amount = f"{gib:.1f} GiB" if gib >= LEAST_GIB else "under 0.05 GiB"
    return f"Its layers keep {amount} of inputs in BF16, of which FP8 saves at most half."


def was_measured(facts: Facts) -> bool:
    """Whether the peak of the step as it is was measured on a GPU."""
    now = arm(facts.trial, ArmName.AS_IS) if recorded(facts, "trial") else None
    return now is not None and recorded(now, "peak_gib") and now.peak_gib is not None


def optimizer_of(facts: Facts) -> str | None:
    """Name the class of the optimizer; None where none was given."""
    known = facts.training.optimizer if recorded(facts, "training.optimizer") else None
    return known.rpartition(".")[2] if known else None


def ledger_of(facts: Facts, fp8: list[Linear], states: int) -> Ledger:
    """Add up what the facts say of each part."""
    network = facts.network
    weights = sum(count * BYTES.get(dtype, 1) for dtype, count in network.dtypes.items()) / GIB
    trained = weights * network.trainable_parameters / network.parameters if network.parameters else 0.0
    keeping = [linear for linear in fp8 if linear.requires_grad is not False]
    counted = all(rows_of(each, facts) for each in keeping if each.role != "experts") and all(
        any(rows_seen(each, facts)) for each in keeping if each.role == "experts"
    )
    inputs = sum(
        2.0 * (rows_of(linear, facts) or 0) * linear.in_features * products_of(linear, facts)
        for linear in keeping
    )
    copies = [linear for linear in fp8 if keeps_copies(linear)]
    return Ledger(
        weights, trained, states * trained, copies_gib(facts, copies), inputs / GIB if counted else None
    )


def _llama_8b(parameters: int) -> Facts:
    """One layer of Transformer Engine stands for all of them."""
    layer = Linear(
        name="layers.0.up",
        stack="transformer_engine",
        use="training",
        features={},
        in_features=4096,
        out_features=14336,
        gemms=1,
        requires_grad=True,
        role="body",
    )
    return Facts(
        network=Network(
            linears=(layer,),
            parameters=parameters,
            trainable_parameters=parameters,
            dtypes={"bfloat16": parameters},
        ),
        training=Training(optimizer=None),
        workload=Workload(tokens=4096),
    )


SICK = _llama_8b(parameters=8_030_261_248)
HEALTHY = _llama_8b(parameters=100_000_000)
