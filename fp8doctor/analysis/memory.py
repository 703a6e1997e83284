"""What a step holds in memory: measured parts, an estimate without them, and the batch that fits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fp8doctor.analysis.activations import GIB, kept_gib
from fp8doctor.analysis.arms import arm_if_any, best_bf16, uses_fp8
from fp8doctor.analysis.fp8_weights import copies_gib, keeps_copies
from fp8doctor.analysis.layers import main_rows
from fp8doctor.cost import products_of, rows_of, rows_seen
from fp8doctor.facts import Arm, Facts, Linear, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName

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


class Peak(NamedTuple):
    """The estimated peak of a step, in GiB."""

    held: Memory
    activations: float | None
    """At the start of the backward; None if unknown."""

    @property
    def gib(self) -> float:
        """Add up: gradients take the place of activations. A lower bound if those are unknown."""
        held = self.held
        return held.weights + held.optimizer + held.fp8_copies + max(held.gradients, self.activations or 0.0)

    def samples(self, whole_gib: float, batch: int) -> int | None:
        """Estimate the largest batch that fits, from the batch of today; None if activations are unknown."""
        room = USABLE * whole_gib - (self.gib - max(self.held.gradients, self.activations or 0.0))
        if not self.activations:
            return None
        return math.floor(batch * room / self.activations) if room >= self.held.gradients else 0


def estimated_peak(facts: Facts) -> Peak | None:
    """Estimate the peak of a step; None for an optimizer of an unknown class."""
    states = optimizer_states(facts)
    if states is None or not recorded(facts, "network.dtypes"):
        return None
    return Peak(memory_of(facts, facts.network.fp8, states), if_recorded(kept_gib, facts))


def optimizer_states(facts: Facts) -> int | None:
    """Return the optimizer's tensors per parameter, AdamW's if it is unknown; None for an unknown class."""
    known = facts.get("training.optimizer")
    return STATES.get(known.rpartition(".")[2] if known else "AdamW")


def memory_of(facts: Facts, fp8: list[Linear], states: int) -> Memory:
    """Add up what the facts say of each part, for these FP8 layers. FSDP2 leaves a process its shards."""
    network, shards = facts.network, facts.get("training.distributed.shards") or 1
    weights = sum(count * BYTES.get(dtype, 1) for dtype, count in network.dtypes.items()) / GIB / shards
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
    """Tell what a measured step holds, next to BF16, and the largest batch that fits; else empty."""
    now = arm_if_any(facts, ArmName.AS_IS)
    whole = gpu_gib(facts)
    of = f" of {whole:.1f}" if whole else ""
    if now is not None and now.get("peak_gib"):
        parts = _parts(now)
        most = largest_batch(now, facts)
        fits = f"; at least {most:,} samples fit (estimated)" if most else ""
        more = ", more if it skips fewer layers" if facts.get("training.layerdrop") else ""
        bf16 = best_bf16(facts) if uses_fp8(facts) else None
        beside = f", {bf16.peak_gib:.1f} in BF16" if bf16 and bf16.get("peak_gib") else ""
        return f"{now.peak_gib:.1f}{of} GiB at the peak{more}{parts}{beside}{fits if not more else ''}"
    seen = facts.get("observed.peak_gib")
    return f"{seen:.1f}{of} GiB at the peak" if seen else ""


def least_with_layerdrop(peak: Peak, facts: Facts) -> float:
    """Estimate the peak of a step that skips as many blocks as its probability says, in GiB."""
    kept = (peak.activations or 0.0) * (1 - (facts.get("training.layerdrop") or 0.0))
    return peak._replace(activations=kept).gib


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
    return f" ({told})" if (told := parts_in_words(named)) else ""


def parts_in_words(named: Iterable[tuple[str, float]]) -> str:
    """List parts by name and GiB, without those that are too small to matter."""
    return ", ".join(f"{name} {gib:.1f}" for name, gib in named if gib >= LEAST_GIB)


def samples(facts: Facts) -> int | None:
    """Read the samples of a micro-batch; None if its rows are all that is known."""
    batch = facts.get("workload.batch_size")
    return None if batch in (if_recorded(main_rows, facts), facts.get("workload.tokens")) else batch


def largest_batch(now: Arm, facts: Facts) -> int | None:
    """Estimate how many samples of a micro-batch fit at least.

    All but weights, FP8 copies and optimizer state is taken to grow with the batch, gradients too: with few
    activations the peak is in the optimizer's step, and tells nothing else of them. None if it does not tell
    more than the batch of today, or a part is unknown.
    """
    memory, whole, batch = now.get("memory"), gpu_gib(facts), samples(facts)
    if memory is None or now.peak_gib is None or not whole or not batch:
        return None
    held = memory.weights_gib + memory.fp8_copies_gib + memory.optimizer_gib
    grows = now.peak_gib - held
    most = math.floor(batch * (USABLE * whole - held) / grows) if grows > 0 else 0
    return most if most > batch else None
