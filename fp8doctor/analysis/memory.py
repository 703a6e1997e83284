"""What a step holds in memory: measured parts, an estimate without them, and the batch that fits."""

from __future__ import annotations

import math
from typing import NamedTuple

from fp8doctor.analysis.arms import arm_if_any
from fp8doctor.analysis.fp8_weights import copies_gib, keeps_copies
from fp8doctor.cost import products_of, rows_of, rows_seen
from fp8doctor.facts import Arm, Facts, Linear, recorded
from fp8doctor.facts.arm_names import ArmName

GIB = 2**30

STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}
"""Class of ``torch.optim`` -> tensors per parameter, in its dtype, by default. Source: torch 2.13."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element; every other dtype of a parameter has one."""


LEAST_GIB = 0.05
"""GiB below which a number would be shown as 0.0."""

USABLE = 0.95
"""Share of the GPU's memory that a step may fill: CUDA's context takes 0.5 GiB, and the allocator's blocks
are never full. A choice of this tool."""


class Memory(NamedTuple):
    """What a step holds, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    fp8_copies: float
    """From the forward to the backward, in addition to the weights."""
    linear_inputs: float | None
    """Inputs in 16 bits that layers keep for their weight gradients; None if a layer's rows are unknown."""

    @property
    def in_both(self) -> float:
        """The part that is the same in BF16 and in FP8."""
        return self.weights + self.gradients + self.optimizer


def optimizer_states(facts: Facts) -> int | None:
    """Return the optimizer's tensors per parameter, AdamW's if it is unknown; None for an unknown class."""
    known = facts.get("training.optimizer")
    return STATES.get(known.rpartition(".")[2] if known else "AdamW")


def memory_of(facts: Facts, fp8: list[Linear], states: int) -> Memory:
    """Add up what the facts say of each part, for these FP8 layers."""
    network = facts.network
    weights = sum(count * BYTES.get(dtype, 1) for dtype, count in network.dtypes.items()) / GIB
    trained = weights * network.trainable_parameters / network.parameters if network.parameters else 0.0
    keeping = [linear for linear in fp8 if linear.requires_grad is not False]
    counted = all(rows_of(each, facts) for each in keeping if each.role != "experts") and all(
        any(rows_seen(each, facts)) for each in keeping if each.role == "experts"
    )
    inputs = sum(
        2.0 * (rows_of(each, facts) or 0) * each.in_features * products_of(each, facts) for each in keeping
    )
    copies = [linear for linear in fp8 if keeps_copies(linear)]
    return Memory(
        weights, trained, states * trained, copies_gib(facts, copies), inputs / GIB if counted else None
    )


def gpu_gib(facts: Facts) -> float | None:
    """Return the memory of the smallest visible GPU in GiB; None if none tells."""
    seen = [gpu.get("memory_gib") for gpu in facts.get("gpus", ()) if gpu.get("visible", True)]
    return min(filter(None, seen), default=None)


def memory_in_words(facts: Facts) -> str:
    """Tell what the step holds, measured or estimated, and the largest batch that fits."""
    now = arm_if_any(facts, ArmName.AS_IS)
    whole = gpu_gib(facts)
    of = f" of {whole:.1f}" if whole else ""
    if now is not None and now.get("peak_gib"):
        parts = _parts(now)
        most = largest_batch(now, facts)
        fits = f"; at least {most:,} samples fit (estimated)" if most else ""
        more = ", more if it skips fewer layers" if facts.get("training.layerdrop") else ""
        return f"{now.peak_gib:.1f}{of} GiB at the peak{more}{parts}{fits if not more else ''}"
    states = optimizer_states(facts)
    if states is None or not recorded(facts, "network.dtypes"):
        return ""
    held = memory_of(facts, facts.network.fp8, states)
    copies = f", up to {held.fp8_copies:.1f} of FP8 copies" if held.fp8_copies >= LEAST_GIB else ""
    amount = f"{held.in_both:.1f}" if held.in_both >= LEAST_GIB else f"under {LEAST_GIB}"
    held_by = "weights, gradients and optimizer state"
    return f"{held_by} {amount}{of} GiB{copies} (estimated); activations unknown"


def _parts(now: Arm) -> str:
    """Write the parts of a measured peak; empty if they are not known."""
    memory = now.get("memory")
    if memory is None:
        return ""
    named = (
        ("weights", memory.weights_gib),
        ("FP8 copies", memory.fp8_copies_gib),
        ("gradients", memory.gradients_gib),
        ("optimizer", memory.optimizer_gib),
        ("activations", memory.activations_gib),
    )
    told = ", ".join(f"{name} {gib:.1f}" for name, gib in named if gib >= LEAST_GIB)
    return f" ({told})" if told else ""


def largest_batch(now: Arm, facts: Facts) -> int | None:
    """Estimate how many samples of a micro-batch fit at least.

    All but weights, FP8 copies and optimizer state is taken to grow with the batch, gradients too: with few
    activations the peak is in the optimizer's step, and tells nothing else of them. None if it does not tell
    more than the batch of today, or a part is unknown.
    """
    memory, whole, batch = now.get("memory"), gpu_gib(facts), facts.get("workload.batch_size")
    if memory is None or now.peak_gib is None or not whole or not batch:
        return None
    held = memory.weights_gib + memory.fp8_copies_gib + memory.optimizer_gib
    grows = now.peak_gib - held
    most = math.floor(batch * (USABLE * whole - held) / grows) if grows > 0 else 0
    return most if most > batch else None
