"""The rows of a plan: every GPU, stack and recipe, with time, range, memory and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.layers import FP8_MULTIPLE
from fp8doctor.analysis.memory import USABLE
from fp8doctor.analysis.modelled_speedup import OFF_IN_BALANCE
from fp8doctor.cost.cast_cost import capability_of
from fp8doctor.cost.layer import NoNumbers
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, recorded
from fp8doctor.facts.arm_names import BF16_BASELINES
from fp8doctor.facts.record import Record
from fp8doctor.gpus import GpuSpec, gpu_specs, has_datasheet, modelled_gpu
from fp8doctor.planning.job_options import STACKS, Options, options_for
from fp8doctor.planning.peaks import peak_of
from fp8doctor.planning.share import Share, is_converted, share_of
from fp8doctor.planning.step_time import Part, Step, step_of
from fp8doctor.recipes import RECIPES, Recipe, of_stack, runs_on

LIMITING = 0.10
"""Share of the FP8 step from which a part counts as a limit. A convention."""


UNCHECKED = 0.25
"""Share for what was compared with nothing. A convention."""

MOST_SAMPLES = 1 << 16
"""Largest batch that is shown. A choice of this tool."""

OFF = {
    ("torchao", "tensor", "Hopper"): 0.12,
    ("torchao", "row", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Hopper"): 0.11,
    ("transformer_engine", "block", "Hopper"): 0.15,
    ("transformer_engine", "tensor", "Blackwell"): 0.16,
    ("transformer_engine", "tensor", "Ada"): 0.15,
}
"""Stack, elements of a scale, GPUs -> share that an estimate may be off.

Hopper: nothing that was published or recorded is further off, but for jobs whose attention is of 2023
(tests/benchmarks/results/published.md and cost_model_h200.md). Blackwell and Ada have jobs of one source
each, which are 5% off at the most: three times that."""


class Row(Record, frozen=True, kw_only=True):
    """One recipe on one GPU."""

    gpu: str
    stack: str
    recipe: str
    bf16_step_ms: float | None = None
    """Of BF16 on this GPU, compiled as all rows are; all times are None if a part has no numbers."""
    step_ms: float | None = None
    speedup: float | None = None
    """Time of that BF16 / of this row."""
    speedup_low: float | None = None
    speedup_high: float | None = None
    bf16_tokens_per_s: float | None = None
    """Of one GPU."""
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    """Peak on one GPU."""
    bf16_memory_gib: float | None = None
    gpu_memory_gib: float
    fits: bool | None = None
    largest_batch: int | None = None
    """Samples of a micro-batch that fit, with the recipe; 0 if none does."""
    limits: tuple[str, ...] = ()
    """Parts that take most of the FP8 step besides the matmuls, the largest first."""
    bf16_limits: tuple[str, ...] = ()
    bf16_largest_batch: int | None = None
    parts_ms: dict[str, float] = msgspec.field(default_factory=dict)
    bf16_parts_ms: dict[str, float] = msgspec.field(default_factory=dict)
    basis: Literal["measured", "modelled"] = "modelled"
    """Of the times."""
    why: str = ""
    """Why there are no times."""

    @property
    def bf16_fits(self) -> bool:
        return self.bf16_memory_gib is not None and self.bf16_memory_gib <= USABLE * self.gpu_memory_gib


class Job(NamedTuple):
    """One GPU's share of a job."""

    share: Share
    options: Options
    scale: float = 1.0
    """A measured BF16 step / the estimated one."""

    def step(self, gpu: GpuSpec, recipe: Recipe | None, *, stack: str) -> Step | None:
        try:
            return step_of(self.share, self.options, gpu, recipe, stack=stack).scaled(self.scale)
        except NoNumbers:
            return None

    def memory(self, gpu: GpuSpec, recipe: Recipe | None, *, stack: str) -> tuple[float, int]:
        """Return the peak in GiB, and the largest batch that fits."""
        peak = peak_of(self.share, self.options, gpu, stack, recipe)
        samples = peak.samples(gpu.memory_gib, self.options.batch) or 0
        return peak.gib, min(MOST_SAMPLES, samples)

    def scaled_to(self, step_ms: float, gpu: GpuSpec) -> float | None:
        """Divide a BF16 step that this GPU took by its estimate; None without one."""
        base = self.step(gpu, None, stack=wanted(self.options)[0].stack)
        return step_ms / base.ms if base else None


def rows(facts: Facts, gpus: str | Sequence[str], options: Options) -> tuple[Row, ...]:
    """Estimate every recipe on every GPU. Raises `UserError` for what cannot be planned."""
    plain, specs, scale = in_bf16(facts), gpu_specs(gpus), None
    job = Job(share_of(plain, options.checked()), options)
    if options.step_ms is not None:
        scale = job.scaled_to(options.step_ms, specs[0])
        if scale is None:
            raise UserError(f"--step-ms scales estimates of the first GPU, and {specs[0].name} has none")
    elif (step_ms := measured_bf16_ms(facts)) and (own := modelled_gpu(facts)):
        as_timed = options_for(facts, {})
        scale = Job(share_of(plain, as_timed), as_timed).scaled_to(step_ms, own)
    job = job._replace(scale=scale or 1.0)
    return tuple(row for gpu in specs for row in _of_gpu(job, gpu))


def measured_bf16_ms(facts: Facts) -> float | None:
    """Return the best BF16 step that a report measured reliably on a known GPU."""
    trial = facts.trial if recorded(facts, "trial") else None
    if (
        trial is None
        or trial.get("device") != "cuda"
        or not trial.get("reliable")
        or not has_datasheet(facts)
    ):
        return None
    times = [each.step_ms for each in trial.arms if each.tried and each.name in BF16_BASELINES]
    return min(filter(None, times), default=None)


def wanted(options: Options) -> list[Recipe]:
    """List the recipes that were asked for. Raises `UserError` for an unknown one."""
    stacks = [STACKS[options.stack]] if options.stack else list(STACKS.values())
    every = [each for stack in stacks for each in of_stack(stack) if each.name != "custom"]
    found = [each for each in every if options.recipe in ("all", each.name)]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in every))
        raise UserError(f"--recipe {options.recipe} is not known; known are all, {known}")
    return found


def recipe_of(row: Row) -> Recipe:
    return RECIPES[(STACKS[row.stack], row.recipe)]


def _of_gpu(job: Job, gpu: GpuSpec) -> Iterator[Row]:
    """Estimate the recipes on one GPU, each next to BF16 in the same framework."""
    for stack, recipes in groupby(wanted(job.options), lambda recipe: recipe.stack):
        bf16 = job.step(gpu, None, stack=stack)
        gib, largest = job.memory(gpu, None, stack=stack)
        row = Row(
            gpu=gpu.name,
            stack=next(name for name, each in STACKS.items() if each == stack),
            recipe="",
            gpu_memory_gib=gpu.memory_gib,
            bf16_memory_gib=gib,
            bf16_largest_batch=largest,
        )
        if bf16 is not None:
            row = replace(
                row,
                bf16_step_ms=bf16.ms,
                bf16_tokens_per_s=tokens_per_s(job.options, bf16.ms),
                bf16_parts_ms=bf16.rounded,
                bf16_limits=limits(bf16),
            )
        for recipe in recipes:
            yield _row(job, gpu, recipe, row, bf16)


def _row(job: Job, gpu: GpuSpec, recipe: Recipe, row: Row, bf16: Step | None) -> Row:
    """Complete the row of BF16 by a recipe."""
    row = replace(row, recipe=recipe.name)
    if gpu.fp8_tflops is None:
        return replace(row, why="the GPU has no FP8 tensor cores")
    if not runs_on(recipe, capability_of(gpu)):
        return replace(row, why="it does not run there")
    if not any(is_converted(each, recipe) for each in job.share.layers):
        odd = sorted({each.rows for each in job.share.layers if each.rows % FP8_MULTIPLE})
        why = f"{odd[-1]:,} rows are no multiple of {FP8_MULTIPLE}, so " if odd else ""
        return replace(row, why=f"{why}it converts no layer of this model")
    gib, largest = job.memory(gpu, recipe, stack=recipe.stack)
    fits = gib <= USABLE * gpu.memory_gib
    row = replace(row, memory_gib=gib, fits=fits, largest_batch=largest)
    step = job.step(gpu, recipe, stack=recipe.stack)
    if bf16 is None:
        return replace(row, why="a part of the model has no numbers")
    if step is None:
        return replace(row, why="its casts were not measured")
    balanced = bf16.in_balance or step.in_balance
    speedup, off = bf16.ms / step.ms, margin(recipe, gpu, in_balance=balanced)
    return replace(
        row,
        step_ms=step.ms,
        speedup=speedup,
        speedup_low=speedup / (1 + off),
        speedup_high=speedup / (1 - off),
        tokens_per_s=tokens_per_s(job.options, step.ms),
        limits=limits(step),
        parts_ms=step.rounded,
    )


def limits(step: Step) -> tuple[Part, ...]:
    """Name the parts that FP8 does not make faster and that take much of the step."""
    others = {part: ms for part, ms in step.parts.items() if part != "matmuls" and ms >= LIMITING * step.ms}
    return tuple(sorted(others, key=lambda part: -others[part]))


def tokens_per_s(options: Options, step_ms: float) -> float:
    return options.batch * options.seq * options.dp * options.accumulate / options.gpus / step_ms * 1e3


def margin(recipe: Recipe, gpu: GpuSpec, *, in_balance: bool) -> float:
    """Return the share by which the estimate may be off, more if host and GPU take turns."""
    least = OFF_IN_BALANCE if in_balance else 0.0
    return max(least, OFF.get((recipe.stack, recipe.granularity, gpu_class(gpu)), UNCHECKED))


def gpu_class(gpu: GpuSpec) -> str:
    """Name the group of GPUs whose published speedups a range rests on."""
    return {"8": "Ada", "9": "Hopper", "10": "Blackwell"}.get(gpu.compute_capability.partition(".")[0], "RTX")
