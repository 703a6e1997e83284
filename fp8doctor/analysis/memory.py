"""What a step holds in memory, measured or estimated, and whether it fits the GPU."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.activations import GIB, dequantized_gib, kept_gib
from fp8doctor.analysis.arms import arm, uses_fp8
from fp8doctor.analysis.layers import main_rows, would_be_converted
from fp8doctor.analysis.own_step import ran_on_a_gpu
from fp8doctor.analysis.trial_view import TrialView
from fp8doctor.cost.matmuls import gemms
from fp8doctor.cost.step_cost import in_bf16, in_fp8, with_each
from fp8doctor.facts import ArmName, Facts, Gpu, Linear, if_recorded, once, recorded
from fp8doctor.gpus import GpuSpec, modelled_gpu
from fp8doctor.recipes import low_precision, stack_of

STATES = {"SGD": 0, "Adafactor": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adagrad": 1, "RMSprop": 1}
"""Class of ``torch.optim`` -> tensors per parameter, in its dtype, by default; Adafactor keeps a row and a
column of each. Source: torch 2.13. With ``8bit`` behind it, a class of torchao or bitsandbytes: in bytes."""

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
    accumulates: bool = False
    """Whether a step has several micro-batches: all but the first add to gradients that are there."""

    @property
    def in_both(self) -> float:
        """The part that is the same in BF16 and in FP8."""
        return self.weights + self.gradients + self.optimizer

    @property
    def new_gradients(self) -> float:
        """Those that take the place of activations: none of a micro-batch that adds to others."""
        return 0.0 if self.accumulates else self.gradients

    @property
    def fixed(self) -> float:
        """The part that does not grow with the batch, next to activations."""
        held = self.weights + self.optimizer + self.fp8_copies + self.dequantized
        return held + self.gradients if self.accumulates else held

    @property
    def gib(self) -> float:
        """Add up: gradients take the place of activations. A lower bound if those are unknown."""
        return self.fixed + max(self.new_gradients, self.activations or 0.0)

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
        return math.floor(batch * room / self.activations) if room >= self.new_gradients else 0


def estimated_peak(facts: Facts) -> Peak | None:
    """Estimate the peak; None for an optimizer that is not known. FSDP2 leaves a process its shards."""
    network, optimizer = facts.network, facts.get("training.optimizer") or "AdamW"
    name = optimizer.rpartition(".")[2]
    states = STATES.get(name.removesuffix("8bit"))
    if states is None or not recorded(facts, "network.dtypes"):
        return None
    shards = facts.get("training.distributed.shards") or 1
    weights = sum(count * BYTES.get(dtype, 1) for dtype, count in network.dtypes.items()) / GIB / shards
    trained = weights * network.trainable_parameters / network.parameters if network.parameters else 0.0
    kept, dequantized = if_recorded(kept_gib, facts), if_recorded(dequantized_gib, facts) or 0.0
    each_gib = network.trainable_parameters / GIB / shards if name.endswith("8bit") else trained
    copies, several = copies_gib(facts, network.fp8), (facts.get("workload.accumulate") or 1) > 1
    return Peak(weights, trained, states * each_gib, copies, kept, dequantized, several)


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
        peaks = dict.fromkeys(f"{least}{each.gib:,.0f}" for each in (self.bf16, self.fp8))
        parts = f"BF16 and {other} take {' and '.join(peaks)} GiB"
        most = self.now.samples(self.gpu_gib, self.batch)
        fits = "" if most is None else " Not even a batch of 1 fits."
        if most:
            fits = f" The largest batch that fits is about {most:,} ({self.batch:,} now)."
        return f"{parts}; the GPU has {self.gpu_gib:,.0f} (estimated).{fits}"


@once
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
    plain = {"use": "none", "dtype": "bfloat16"}
    loaded = with_each(facts, lambda each: replace(each, **plain) if each.use == "storage" else each)
    return replace(loaded, network=replace(loaded.network, dtypes=dict(dtypes)))


def stored_weights_fit_in_bf16(facts: Facts) -> bool | None:
    """Return whether BF16 in place of stored weights fits: by the peak that was seen, else estimated."""
    now, whole = arm(facts, ArmName.AS_IS), gpu_gib(facts)
    peak: float | None = (now.get("peak_gib") if now else None) or facts.get("observed.peak_gib")
    if peak and whole:
        stored = [each for each in facts.network.linears if each.use == "storage"]
        more = sum((2 - BYTES.get(each.dtype, 1)) * each.parameters for each in stored) / GIB
        return peak + more <= USABLE * whole
    found = if_recorded(fit, facts)
    return None if found is None else found.holds(found.bf16)


def samples(facts: Facts) -> int | None:
    """Read the samples of a micro-batch; None if its rows are all that is known."""
    batch = facts.get("workload.batch_size")
    return None if batch in (if_recorded(main_rows, facts), facts.get("workload.tokens")) else batch


def memory_row(facts: Facts) -> str:
    """Tell what the step holds in FP8 and BF16, measured, watched or estimated; empty if that is unknown."""
    now, whole, batch = arm(facts, ArmName.AS_IS), gpu_gib(facts), samples(facts)
    drops, of = facts.get("training.layerdrop"), f" of {whole:.1f}" if whole else ""
    if now is not None and (peak_gib := now.get("peak_gib")):
        held, bf16 = now.get("memory"), TrialView(facts).bf16 if uses_fp8(facts) else None
        most, told = None, ""
        if held:  # all but weights and optimizer is taken to grow with the batch
            fixed = held.weights_gib + held.optimizer_gib
            grows = Peak(fixed, 0.0, 0.0, 0.0, peak_gib - fixed)
            most = grows.samples(whole, batch) if whole else None
            names = ("weights", "gradients", "optimizer", "activations")
            shown = _shown({name: getattr(held, f"{name}_gib") for name in names})
            told = f" ({', '.join(shown)})" if shown else ""
        beside = f", {bf16.arm.peak_gib:.1f} in BF16" if bf16 and bf16.arm.get("peak_gib") else ""
        more = most and batch and most > batch and not drops
        fits = f"; at least {most:,} samples fit (estimated)" if more else ""
        return f"{peak_gib:.1f}{of} GiB at the peak{told}{beside}{fits}"
    if seen := facts.get("observed.peak_gib"):
        return f"{seen:.1f}{of} GiB at the peak"
    found = fit(facts)
    peak = found.now if found else estimated_peak(facts)
    if peak is None:
        return ""
    kept = peak.activations or 0.0
    parts = {
        "weights and optimizer": peak.weights + peak.optimizer,
        "FP8 copies": peak.fp8_copies,
        "dequantized weights": peak.dequantized,
        "gradients": peak.gradients if peak.accumulates or peak.gradients > kept else 0.0,
        "activations": kept if kept >= peak.new_gradients else 0.0,
    }
    unknown = ["activations unknown"] if peak.activations is None else []
    told = ", ".join((*(_shown(parts) if peak.gib >= 1.0 else ()), *unknown, "estimated"))
    size = f"{'at least' if unknown else 'about'} {peak.gib:.1f}"
    if found is None or peak.gib < LEAST_GIB:
        size = f"under {LEAST_GIB}{of}" if peak.gib < LEAST_GIB else size
        return f"{size} GiB at the peak ({told})"
    other, name = (found.fp8, "FP8") if found.form == "BF16" else (found.bf16, "BF16")
    most = None if drops else peak.samples(found.gpu_gib, batch)
    form = f"{'with' if found.form == LOW else 'in'} {found.form}, {other.gib:.1f} in {name}"
    fits = f"; about {most:,} samples fit" if most else ""
    return f"{size} of {found.gpu_gib:.1f} GiB at the peak {form} ({told}){fits}"


def _shown(parts: Mapping[str, float]) -> list[str]:
    """List parts by name and GiB, without those that are too small to matter."""
    return [f"{name} {gib:.1f}" for name, gib in parts.items() if gib >= LEAST_GIB]


# --- copies of weights in FP8 ---

NEEDS_TRANSPOSED = ("8.9", "9.0", "12.0", "12.1")
"""Compute capabilities whose FP8 matmuls take one layout only. Source: ``is_non_tn_fp8_gemm_supported`` in
``pytorch/utils.py`` of Transformer Engine 2.20; NVIDIA/TransformerEngine #1880."""


def copies_on(gpu: Gpu | GpuSpec | None) -> int:
    """Count the FP8 copies of a weight: two if the GPU, or none is known, needs a transposed one."""
    return 2 if gpu is None or gpu.compute_capability in NEEDS_TRANSPOSED else 1


def keeps_copies(linear: Linear) -> bool:
    return stack_of(linear).keeps_copies and not linear.get("features", {}).get("primary_weights_in_fp8")


def keeps_transposed(linear: Linear) -> bool:
    """Return whether a compiled block keeps the transposed copy of a weight that FSDP2 gathers in FP8.

    FSDP2 frees the gathered weight after the forward, but not that copy. Seen in the saved tensors of a Llama
    (torch 2.13, torchao 0.18, a CPU): 79% of the blocks' weights, none of them if the blocks are checkpointed
    or FSDP2 gathers BF16. ``force_recompute_fp8_weight_in_bwd`` changes nothing.
    """
    return bool(linear.get("features", {}).get("float8_all_gather_weight")) and compiler_keeps(linear)


def compiler_keeps(linear: Linear) -> bool:
    """Return whether compiled code decides what the forward of this layer keeps."""
    return linear.compiled is not None and linear.get("checkpointed") is None


def copies_gib(facts: Facts, layers: Iterable[Linear]) -> float:
    """Sum up the FP8 copies of Transformer Engine's weights, and of those that FSDP2 gathers in FP8.
    A checkpointed region makes its own again (h200-te_checkpointed_inside: 0.1 of 2.0 GiB)."""
    copies = copies_on(next((gpu for gpu in facts.get("gpus", ()) if gpu.visible), None))
    kept = Counter[str | None]()
    for each in layers:
        size = each.in_features * each.out_features * gemms(each)
        kept[each.get("checkpointed")] += (copies * keeps_copies(each) + keeps_transposed(each)) * size
    return (kept.pop(None, 0) + max(kept.values(), default=0)) / GIB
