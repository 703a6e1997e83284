"""The rows of a plan: every GPU, stack and recipe, with time, range, memory and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.memory import USABLE
from fp8doctor.cost.cast_cost import capability_of
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.facts.record import Record
from fp8doctor.gpus import GpuSpec, gpu_specs
from fp8doctor.planning.converted import converts_any
from fp8doctor.planning.job_options import STACKS, Options
from fp8doctor.planning.measured import Form, Measured, measured
from fp8doctor.planning.peaks import largest_batch, peak_of
from fp8doctor.planning.ranges import margin
from fp8doctor.planning.share import Share, share_of
from fp8doctor.planning.step_time import Part, Step, step_of
from fp8doctor.recipes import RECIPES, Recipe, of_stack, runs_on

LIMITING = 0.10
"""Share of the FP8 step from which a part counts as a limit. A convention."""


NOT_THERE = "it does not run there"

CONVERTS_NOTHING = "it converts no layer of this model"


class Row(Record, frozen=True, kw_only=True):
    """One recipe on one GPU."""

    gpu: str
    stack: str
    recipe: str
    compiled: bool
    bf16_step_ms: float | None = None
    """Of the faster BF16 on this GPU; all times are None if a part has no numbers."""
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
    """Of the times: a saved report has them, or the cost model."""
    why: str = ""
    """Why there are no times."""

    @property
    def bf16_fits(self) -> bool:
        return self.bf16_memory_gib is not None and self.bf16_memory_gib <= USABLE * self.gpu_memory_gib


class Job(NamedTuple):
    """One GPU's share of a job, and what was measured of it."""

    share: Share
    options: Options
    measured: Measured | None
    scale: float = 1.0
    """The BF16 step of `Options.step_ms` / the estimated one."""

    def step(self, gpu: GpuSpec, recipe: Recipe | None, *, stack: str, compiled: bool) -> Step | None:
        """Estimate the step of a form, scaled by the measured times if there are some."""
        step = step_of(self.share, self.options, gpu, recipe, stack=stack, compiled=compiled)
        if step is None:
            return None
        if self.measured is not None:
            step = self.measured.scaled(step, Form(recipe, compiled))
        return replace(step, parts={part: ms * self.scale for part, ms in step.parts.items()})

    def basis(self, gpu: GpuSpec, recipe: Recipe, *, compiled: bool) -> Literal["measured", "modelled"]:
        """Return how the time of a row is known."""
        timed = self.measured and self.measured.gpu == gpu and Form(recipe, compiled) in self.measured.ratios
        return "measured" if timed else "modelled"


def rows(facts: Facts, gpus: str | Sequence[str], options: Options) -> tuple[Row, ...]:
    """Estimate every recipe on every GPU. Raises `UserError` for what cannot be planned."""
    share = share_of(in_bf16(facts), options.checked())
    job = Job(share, options, measured(facts))
    specs = gpu_specs(gpus)
    if options.step_ms is not None:
        base = next((row.bf16_step_ms for row in _of_gpu(job, specs[0])), None)
        if base is None:
            raise UserError(f"--step-ms scales estimates of the first GPU, and {specs[0].name} has none")
        job = job._replace(scale=options.step_ms / base)
    return tuple(row for gpu in specs for row in _of_gpu(job, gpu))


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
    """Look up the recipe of a row."""
    return RECIPES[(STACKS[row.stack], row.recipe)]


def _of_gpu(job: Job, gpu: GpuSpec) -> Iterator[Row]:
    """Estimate the recipes on one GPU, each next to BF16 in the same framework."""
    for stack, recipes in groupby(wanted(job.options), lambda recipe: recipe.stack):
        forms = {compiled: job.step(gpu, None, stack=stack, compiled=compiled) for compiled in (True, False)}
        known = [each for each in forms.values() if each is not None]
        bf16 = min(known, key=lambda each: each.ms, default=None)
        without_times = _without_times(job, gpu, stack, bf16, compiled=bf16 is forms[True])
        for recipe in recipes:
            row = _row(job, gpu, recipe, without_times, bf16, compiled=True)
            yield row
            if row.step_ms is not None and not recipe.only_compiled:
                yield _row(job, gpu, recipe, without_times, bf16, compiled=False)


def _with_memory(job: Job, gpu: GpuSpec, recipe: Recipe, row: Row, *, compiled: bool) -> Row:
    """Add the peak of a recipe, and whether it fits."""
    peak = peak_of(job.share, job.options, gpu, recipe.stack, recipe, compiled=compiled)
    return replace(
        row,
        memory_gib=peak.gib,
        fits=peak.gib <= USABLE * gpu.memory_gib,
        largest_batch=largest_batch(peak, job.options, gpu),
    )


def _without_times(job: Job, gpu: GpuSpec, stack: str, bf16: Step | None, *, compiled: bool) -> Row:
    """Describe the GPU and the faster BF16, which is ``compiled`` or not."""
    peak = peak_of(job.share, job.options, gpu, stack, None, compiled=compiled)
    return Row(
        gpu=gpu.name,
        stack=next(name for name, each in STACKS.items() if each == stack),
        recipe="",
        compiled=True,
        gpu_memory_gib=gpu.memory_gib,
        bf16_memory_gib=peak.gib,
        bf16_step_ms=bf16.ms if bf16 else None,
        bf16_tokens_per_s=tokens_per_s(job.options, bf16.ms) if bf16 else None,
        bf16_parts_ms=_rounded(bf16) if bf16 else {},
        bf16_limits=limits(bf16) if bf16 else (),
        bf16_largest_batch=largest_batch(peak, job.options, gpu),
    )


def _row(job: Job, gpu: GpuSpec, recipe: Recipe, row: Row, bf16: Step | None, *, compiled: bool) -> Row:
    """Complete a row without times by those of a recipe."""
    row = replace(row, recipe=recipe.name, compiled=compiled)
    if gpu.fp8_tflops is None:
        return replace(row, why="the GPU has no FP8 tensor cores")
    if not runs_on(recipe, capability_of(gpu)):
        return replace(row, why=NOT_THERE)
    if not converts_any(job.share, recipe):
        return replace(row, why=CONVERTS_NOTHING)
    row = _with_memory(job, gpu, recipe, row, compiled=compiled)
    step = job.step(gpu, recipe, stack=recipe.stack, compiled=compiled)
    if step is None or bf16 is None:
        return replace(
            row, why="its casts were not measured" if bf16 else "a part of the model has no numbers"
        )
    balanced = bf16.in_balance or step.in_balance
    speedup, off = bf16.ms / step.ms, margin(recipe, gpu, compiled=compiled, in_balance=balanced)
    return replace(
        row,
        step_ms=step.ms,
        speedup=speedup,
        speedup_low=speedup / (1 + off),
        speedup_high=speedup / (1 - off),
        tokens_per_s=tokens_per_s(job.options, step.ms),
        limits=limits(step),
        parts_ms=_rounded(step),
        basis=job.basis(gpu, recipe, compiled=compiled),
    )


def limits(step: Step) -> tuple[Part, ...]:
    """Name the parts that FP8 does not make faster and that take much of the step."""
    others = {part: ms for part, ms in step.parts.items() if part != "matmuls" and ms >= LIMITING * step.ms}
    return tuple(sorted(others, key=lambda part: -others[part]))


def _rounded(step: Step) -> dict[str, float]:
    return {part: round(ms, 3) for part, ms in step.parts.items() if ms}


def tokens_per_s(options: Options, step_ms: float) -> float:
    """Return the tokens of one step and GPU per second."""
    return options.batch * options.seq * options.dp * options.accumulate / options.gpus / step_ms * 1e3
