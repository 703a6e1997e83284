"""What a step holds in memory, measured or estimated, and whether it fits the GPU."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.activations import GIB, dequantized_gib, kept_gib
from fp8doctor.analysis.arms import arm_if_any, uses_fp8
from fp8doctor.analysis.fp8_weights import copies_gib
from fp8doctor.analysis.layers import main_rows, would_be_converted
from fp8doctor.analysis.own_step import ran_on_a_gpu
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.step_cost import in_bf16, in_fp8
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.gpus import modelled_gpu
from fp8doctor.recipes import low_precision

STATES = {"SGD": 0, "Adafactor": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}
"""Class of ``torch.optim`` -> tensors per parameter, in its dtype, by default; Adafactor keeps a row and a
column of each. Source: torch 2.13."""

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element; every other dtype of a parameter has one."""


LEAST_GIB = 0.05
"""GiB below which a number would be shown as 0.0."""

USABLE = 0.95
"""Share of the GPU's memory that a step may fill: CUDA's context takes 0.5 GiB, and the allocator's blocks
are never full. A choice; NVIDIA's LoRA of a Llama 70B ran above it by the estimate
(``research/benchmarks/published.py``)."""


class Peak(NamedTuple):
    """What a step holds at its peak, in GiB."""

    weights: float
    gradients: float
    optimizer: float
    fp8_copies: float
    """From the forward to the backward, in addition to the weights."""
    activations: float | None
    """At the start of the backward; None if unknown."""
    dequantized: float = 0.0
    """Copies in 16 bits of stored weights, kept for the backward."""

    @property
    def in_both(self) -> float:
        """The part that is the same in BF16 and in FP8."""
        return self.weights + self.gradients + self.optimizer

    @property
    def fixed(self) -> float:
        """The part that does not grow with the batch."""
        return self.weights + self.optimizer + self.fp8_copies + self.dequantized

    @property
    def gib(self) -> float:
        """Add up: gradients take the place of activations. A lower bound if those are unknown."""
        return self.fixed + max(self.gradients, self.activations or 0.0)

    @property
    def least_gib(self) -> float:
        """The peak without FP8 copies, which may be freed early, and with the fewest activations."""
        least = (self.activations or 0.0) / (1 + MAY_BE_OFF)
        return self._replace(activations=least, fp8_copies=0.0).gib

    def samples(self, whole_gib: float, batch: int | None) -> int | None:
        """Estimate the largest batch that fits, from the batch of today; None if a part is unknown."""
        room = USABLE * whole_gib - self.fixed
        if not self.activations or not batch:
            return None
        return math.floor(batch * room / self.activations) if room >= self.gradients else 0


def estimated_peak(facts: Facts) -> Peak | None:
    """Estimate the peak; None for an optimizer that is not known. FSDP2 leaves a process its shards."""
    network, states = facts.network, optimizer_states(facts)
    if states is None or not recorded(facts, "network.dtypes"):
        return None
    shards = facts.get("training.distributed.shards") or 1
    weights = sum(count * BYTES.get(dtype, 1) for dtype, count in network.dtypes.items()) / GIB / shards
    trained = weights * network.trainable_parameters / network.parameters if network.parameters else 0.0
    kept, dequantized = if_recorded(kept_gib, facts), if_recorded(dequantized_gib, facts) or 0.0
    return Peak(weights, trained, states * trained, copies_gib(facts, network.fp8), kept, dequantized)


def optimizer_states(facts: Facts) -> int | None:
    """Return the optimizer's tensors per parameter, AdamW's if it is unknown; None for an unknown class."""
    known = facts.get("training.optimizer")
    return STATES.get(known.rpartition(".")[2] if known else "AdamW")


def gpu_gib(facts: Facts) -> float | None:
    """Return the memory of the smallest visible GPU in GiB; None if none tells."""
    seen = [gpu.get("memory_gib") for gpu in facts.get("gpus", ()) if gpu.get("visible", True)]
    return min(filter(None, seen), default=None)


MAY_BE_OFF = 0.75
"""Share of the estimated activations that decides nothing: at most 0.70 of them were too much, of a decoder
whose cross entropy takes logits in 16 bits (h200-gpt_124m_whole). In the median peaks were 4% off. Source:
`tests.analysis.test_memory`."""


LOW = "low-precision weights"
"""What a job is in whose weights are stored in 4 or 8 bits, and not made for FP8 training."""


class Fit(Struct, frozen=True):
    """The estimated peaks of a job next to its GPU's memory."""

    bf16: Peak
    fp8: Peak
    form: str
    """Of the job now: BF16, FP8, or weights in low precision, which ``fp8`` keeps."""
    gpu_gib: float
    batch: int | None

    @property
    def now(self) -> Peak:
        return self.bf16 if self.form == "BF16" else self.fp8

    def holds(self, peak: Peak) -> bool:
        """Return whether this peak fits the GPU."""
        return peak.gib <= USABLE * self.gpu_gib

    @property
    def is_too_large(self) -> bool:
        """Whether even the least that the job may take does not fit."""
        return self.now.least_gib > USABLE * self.gpu_gib

    @property
    def may_be_too_large(self) -> bool:
        return not self.holds(self.now)

    @property
    def sentence(self) -> str:
        """Tell both peaks, and the batch that fits."""
        least = "" if self.now.activations is not None else "at least "
        other = "FP8" if self.form == "BF16" else self.form
        parts = f"BF16 takes {least}{self.bf16.gib:,.0f} GiB, {other} {least}{self.fp8.gib:,.0f}"
        most = self.now.samples(self.gpu_gib, self.batch)
        fits = "" if most is None else " Not even a batch of 1 fits."
        if most:
            fits = f" The largest batch that fits is about {most:,} ({self.batch:,} now)."
        return f"{parts}; the GPU has {self.gpu_gib:,.0f} (estimated).{fits}"


def fit(facts: Facts) -> Fit | None:
    """Estimate both peaks of a job that did not run on a GPU.

    None if it did, if its parts lie on several GPUs, or if the optimizer or the GPU's memory is unknown.
    """
    ranks = (facts.get("training.distributed.world_size"), facts.get("ranks.world_size"))
    spread = any(count and count > 1 for count in ranks)  # and DeepSpeed may offload its optimizer
    spread = spread or facts.get("training.accelerate.distributed") == "DEEPSPEED"
    if if_recorded(ran_on_a_gpu, facts) or spread or facts.get("trial.device", "cpu") != "cpu":
        return None
    assumed = modelled_gpu(facts) if facts.get("assumed_gpu") else None
    whole = (assumed and assumed.memory_gib) if facts.get("assumed_gpu") else gpu_gib(facts)
    linears = facts.network.linears
    stored = [each for each in linears if each.use == "storage"]
    is_in_fp8 = facts.network.fp8 or stored
    bf16 = estimated_peak(in_bf16(_loaded_in_bf16(facts, stored) if stored else facts))
    fp8 = estimated_peak(facts if is_in_fp8 else in_fp8(facts, filter(would_be_converted, linears)))
    if whole is None or bf16 is None or fp8 is None:
        return None
    form = low_precision(facts.network.fp8) if facts.network.fp8 else LOW if stored else "BF16"
    return Fit(bf16, fp8, form, whole, samples(facts))


def _loaded_in_bf16(facts: Facts, stored: Iterable[Linear]) -> Facts:
    dtypes = Counter(facts.network.dtypes if recorded(facts, "network.dtypes") else {})
    for linear in stored:
        dtypes[linear.dtype] -= linear.parameters
        dtypes["bfloat16"] += linear.parameters
    linears = (
        replace(each, use="none", dtype="bfloat16") if each.use == "storage" else each
        for each in facts.network.linears
    )
    return replace(facts, network=replace(facts.network, dtypes=dict(dtypes), linears=tuple(linears)))


def stored_weights_fit_in_bf16(facts: Facts) -> bool | None:
    """Return whether BF16 in place of stored weights fits: by the peak that was seen, else estimated."""
    now, whole = arm_if_any(facts, ArmName.AS_IS), gpu_gib(facts)
    peak: float | None = (now.get("peak_gib") if now else None) or facts.get("observed.peak_gib")
    if peak and whole:
        stored = [each for each in facts.network.linears if each.use == "storage"]
        more = sum((2 - BYTES.get(each.dtype, 1)) * each.parameters for each in stored) / GIB
        return peak + more <= USABLE * whole
    found = if_recorded(fit, facts)
    return None if found is None else found.holds(found.bf16)


def recomputing(found: Fit, facts: Facts, regions: Mapping[str, str]) -> Peak | None:
    """Estimate the peak of the job with these checkpointed regions, by layer; None if rows are unknown."""
    linears = (replace(each, checkpointed=regions.get(each.name)) for each in facts.network.linears)
    after = replace(facts, network=replace(facts.network, linears=tuple(linears)))
    kept = if_recorded(kept_gib, in_bf16(after) if found.form == "BF16" else after)
    copies, dequantized = copies_gib(after, after.network.fp8), if_recorded(dequantized_gib, after) or 0.0
    changed = found.now._replace(fp8_copies=copies, activations=kept, dequantized=dequantized)
    return None if kept is None else changed


def samples(facts: Facts) -> int | None:
    """Read the samples of a micro-batch; None if its rows are all that is known."""
    batch = facts.get("workload.batch_size")
    return None if batch in (if_recorded(main_rows, facts), facts.get("workload.tokens")) else batch


def memory_row(facts: Facts) -> str:
    """Tell what the step holds in FP8 and BF16, measured, watched or estimated; empty if that is unknown."""
    now, whole, batch = arm_if_any(facts, ArmName.AS_IS), gpu_gib(facts), samples(facts)
    drops, of = facts.get("training.layerdrop"), f" of {whole:.1f}" if whole else ""
    if now is not None and (peak_gib := now.get("peak_gib")):
        held, bf16 = now.get("memory"), TrialView(facts).bf16 if uses_fp8(facts) else None
        most, told = None, ""
        if held:  # all but weights and optimizer is taken to grow with the batch
            fixed = Peak(held.weights_gib, 0.0, held.optimizer_gib, 0.0, None)
            grows = fixed._replace(activations=peak_gib - fixed.gib)
            most = grows.samples(whole, batch) if whole else None
            names = ("weights", "gradients", "optimizer", "activations")
            shown = _shown({name: getattr(held, f"{name}_gib") for name in names})
            told = f" ({', '.join(shown)})" if shown else ""
        beside = f", {bf16.arm.peak_gib:.1f} in BF16" if bf16 and bf16.arm.get("peak_gib") else ""
        fits = f"; at least {most:,} samples fit (estimated)" if most and batch and most > batch else ""
        more = ", more if it skips fewer layers" if drops else fits
        return f"{peak_gib:.1f}{of} GiB at the peak{told}{beside}{more}"
    if seen := facts.get("observed.peak_gib"):
        return f"{seen:.1f}{of} GiB at the peak"
    found = fit(facts)
    peak = found.now if found else estimated_peak(facts)
    if peak is None:
        return ""
    last = "gradients" if peak.gradients > (peak.activations or 0.0) else "activations"
    parts = {
        "weights and optimizer": peak.weights + peak.optimizer,
        "FP8 copies": peak.fp8_copies,
        "dequantized weights": peak.dequantized,
        last: max(peak.gradients, peak.activations or 0.0),
    }
    unknown = ["activations unknown"] if peak.activations is None else []
    told = ", ".join((*(_shown(parts) if peak.gib >= 1.0 else ()), *unknown, "estimated"))
    size = f"{'at least' if unknown else 'about'} {peak.gib:.1f}"
    if peak.gib < LEAST_GIB:
        size, found = f"under {LEAST_GIB}{of}", None
    if found is None:
        return f"{size} GiB at the peak ({told})"
    other, name = (found.fp8, "FP8") if found.form == "BF16" else (found.bf16, "BF16")
    most = None if drops else peak.samples(found.gpu_gib, batch)
    form = f"{'with' if found.form == LOW else 'in'} {found.form}, {other.gib:.1f} in {name}"
    fits = f"; about {most:,} samples fit" if most else ""
    return f"{size} of {found.gpu_gib:.1f} GiB at the peak {form} ({told}){fits}"


def _shown(parts: Mapping[str, float]) -> list[str]:
    """List parts by name and GiB, without those that are too small to matter."""
    return [f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= LEAST_GIB]
