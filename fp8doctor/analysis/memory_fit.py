"""Whether a step that did not run fits into the GPU's memory, in BF16 and in FP8."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from fp8doctor.analysis.layers import would_be_converted
from fp8doctor.analysis.memory import (
    LEAST_GIB,
    USABLE,
    Peak,
    estimated_peak,
    gpu_gib,
    least_with_layerdrop,
    memory_in_words,
    parts_in_words,
    samples,
)
from fp8doctor.analysis.timed_step import ran_on_a_gpu
from fp8doctor.cost.step_cost import in_bf16, with_linears
from fp8doctor.facts import Facts, Linear, if_recorded, recorded
from fp8doctor.gpus import has_datasheet, modelled_gpu
from fp8doctor.recipes import TORCHAO

MAY_BE_OFF = 0.65
"""Share of the estimate within which it decides nothing: the most that one was too high, of a decoder whose
cross entropy takes logits in 16 bits (h200-gpt_124m_whole). In the median they were 4% off. Source:
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

    @property
    def is_too_large(self) -> bool:
        """Return whether the peak is beyond the memory by more than its error, or without activations."""
        return max(self.now.held.in_both, self.now.gib / (1 + MAY_BE_OFF)) > self.gpu_gib

    @property
    def may_be_too_large(self) -> bool:
        return self.now.gib > USABLE * self.gpu_gib

    @property
    def numbers(self) -> str:
        """Write both peaks and the memory."""
        least = "" if self.now.activations is not None else "at least "
        other = "FP8" if self.form == "BF16" else self.form
        parts = f"BF16 takes {least}{self.bf16.gib:,.0f} GiB, {other} {least}{self.fp8.gib:,.0f}"
        return f"{parts}; the GPU has {self.gpu_gib:,.0f} (estimated)"

    @property
    def sentence(self) -> str:
        """Say whether it fits, and how much of it the batch cannot change."""
        told = f"{self.numbers}. "
        if self._fixed > USABLE * self.gpu_gib:
            return f"{told}Weights, gradients and optimizer state alone take {self._fixed:,.0f}."
        most = self.now.samples(self.gpu_gib, self.batch) if self.batch else None
        if most:
            return f"{told}The largest batch that fits is about {most:,} ({self.batch:,} now)."
        return f"{told}Not even a batch of 1 fits."

    @property
    def fix(self) -> str:
        """Say what to change so that it fits."""
        count = math.ceil(self._fixed / (USABLE * self.gpu_gib))
        if count > 1:
            return f"Shard it over {count} GPUs or more (FSDP), or train fewer parameters (LoRA)."
        return "Use a smaller batch, checkpoint the blocks, or shard the model (FSDP)."

    @property
    def _fixed(self) -> float:
        return self.now.held.in_both + self.now.held.fp8_copies


def memory_row(facts: Facts) -> str:
    """Tell what the step holds in FP8 and BF16, measured or estimated; empty if that is unknown."""
    if measured := memory_in_words(facts):
        return measured
    if watched := facts.get("observed.peak_gib"):
        whole = gpu_gib(facts)
        return f"{watched:.1f}{f' of {whole:.1f}' if whole else ''} GiB at the peak of the script's steps"
    found = fit(facts)
    if found is None:
        peak = estimated_peak(facts)
        if peak is None:
            return ""
        least = "about" if peak.activations is not None else "at least"
        size = f"{least} {peak.gib:.1f}" if peak.gib >= LEAST_GIB else f"under {LEAST_GIB}"
        return f"{size} GiB at the peak ({_parts(peak)})"
    now = found.now
    other, name = (found.fp8, "FP8") if found.form == "BF16" else (found.bf16, "BF16")
    most = now.samples(found.gpu_gib, found.batch) if found.batch else None
    fits = f"; about {most:,} samples fit" if most and not facts.get("training.layerdrop") else ""
    if now.gib < LEAST_GIB:
        return f"under {LEAST_GIB} of {found.gpu_gib:.1f} GiB at the peak (estimated)"
    drops = f"{least_with_layerdrop(now, facts):.1f} to " if facts.get("training.layerdrop") else ""
    form = f"{'with' if found.form == LOW else 'in'} {found.form}"
    least = "about" if now.activations is not None else "at least"
    told = f"{least} {drops}{now.gib:.1f} of {found.gpu_gib:.1f} GiB at the peak"
    return f"{told} {form}, {other.gib:.1f} in {name} ({_parts(now)}){fits}"


def _parts(peak: Peak) -> str:
    """Write the parts that are held at the peak, which add up to it, and the basis."""
    held, kept = peak.held, peak.activations
    if peak.gib < 1.0:  # each may be too small to be shown
        return "estimated"
    last = "gradients" if held.gradients > (kept or 0.0) else "activations"
    named = (
        ("weights and optimizer", held.weights + held.optimizer),
        ("FP8 copies", held.fp8_copies),
        (last, max(held.gradients, kept or 0.0)),
    )
    unknown = "activations unknown" if kept is None else ""
    return ", ".join(filter(None, (parts_in_words(named), unknown, "estimated")))


def fit(facts: Facts) -> Fit | None:
    """Estimate both peaks of a job that did not run on a GPU.

    None if it did, if its parts lie on several GPUs, or if the optimizer or the GPU's memory is unknown.
    """
    if if_recorded(ran_on_a_gpu, facts) or _is_spread(facts) or facts.get("trial.device", "cpu") != "cpu":
        return None
    whole = _whole_gib(facts)
    stored = [each for each in facts.network.linears if each.use == "storage"]
    bf16 = estimated_peak(in_bf16(_loaded_in_bf16(facts, stored) if stored else facts))
    fp8 = estimated_peak(facts if facts.network.fp8 or stored else _in_fp8(facts))
    if whole is None or bf16 is None or fp8 is None:
        return None
    form = "FP8" if facts.network.fp8 else LOW if stored else "BF16"
    return Fit(bf16, fp8, form, whole, samples(facts))


def step_now(facts: Facts) -> str:
    """Name the step as it is, in a comparison; one that does not fit does not run now."""
    memory = if_recorded(fit, facts)
    return "without the fix" if memory and memory.is_too_large else "now"


def _is_spread(facts: Facts) -> bool:
    """Return whether other GPUs or the host hold a part; DeepSpeed may offload its optimizer."""
    if facts.get("training.accelerate.distributed") == "DEEPSPEED":
        return True
    ranks = (facts.get("training.distributed.world_size"), facts.get("ranks.world_size"))
    return any(count and count > 1 for count in ranks)


def _whole_gib(facts: Facts) -> float | None:
    """Return the memory of the assumed GPU, else of the smallest visible one."""
    if not facts.get("assumed_gpu"):
        return gpu_gib(facts)
    gpu = modelled_gpu(facts) if has_datasheet(facts) else None
    return gpu.memory_gib if gpu else None


def _loaded_in_bf16(facts: Facts, stored: Iterable[Linear]) -> Facts:
    """Give these layers weights in BF16."""
    dtypes = Counter(facts.network.dtypes if recorded(facts, "network.dtypes") else {})
    for linear in stored:
        dtypes[linear.dtype] -= linear.parameters
        dtypes["bfloat16"] += linear.parameters
    return replace(facts, network=replace(facts.network, dtypes=dict(dtypes)))


def _in_fp8(facts: Facts) -> Facts:
    """Convert a model without FP8, as the usual filter does."""
    linears = (
        replace(each, use="training", stack=TORCHAO.name, recipe="tensorwise")
        if would_be_converted(each)
        else each
        for each in facts.network.linears
    )
    return with_linears(facts, tuple(linears))
