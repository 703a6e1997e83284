"""The rows of a plan: every GPU, stack and recipe, with time, range, memory and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec

from fp8doctor.analysis.memory import USABLE
from fp8doctor.cost.cast_cost import capability_of
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts
from fp8doctor.facts.record import Record
from fp8doctor.gpus import GpuSpec, gpu_spec
from fp8doctor.planning.measured import Form, Measured, measured
from fp8doctor.planning.memory import largest_batch, peak_of
from fp8doctor.planning.options import Options, options_for
from fp8doctor.planning.ranges import margin
from fp8doctor.planning.share import Share, share_of
from fp8doctor.planning.step import Part, Step, step_of
from fp8doctor.recipes import RECIPES, Recipe, of_stack, runs_on

STACKS = {"torchao": "torchao", "te": "transformer_engine"}
"""Name on the command line -> name in `fp8doctor.recipes`."""

LIMITING = 0.10
"""Share of the FP8 step from which a part counts as a limit. A convention."""


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
    speedup_low: float | None = None
    speedup_high: float | None = None
    bf16_tokens_per_s: float | None = None
    """Of one GPU."""
    tokens_per_s: float | None = None
    memory_gib: float | None = None
    bf16_memory_gib: float | None = None
    gpu_memory_gib: float
    fits: bool | None = None
    largest_batch: int | None = None
    """Samples of a micro-batch that fit, with the recipe; 0 if none does."""
    limits: tuple[str, ...] = ()
    """Parts that take most of the FP8 step beside the matmuls, the largest first."""
    bf16_limits: tuple[str, ...] = ()
    bf16_largest_batch: int | None = None
    parts_ms: dict[str, float] = msgspec.field(default_factory=dict)
    bf16_parts_ms: dict[str, float] = msgspec.field(default_factory=dict)
    basis: str = "modelled"
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

    def step(self, gpu: GpuSpec, recipe: Recipe | None, *, stack: str, compiled: bool) -> Step | None:
        """Estimate the step of a form, scaled by the measured times if there are some."""
        step = step_of(self.share, self.options, gpu, recipe, stack=stack, compiled=compiled)
        if step is None or self.measured is None:
            return step
        return self.measured.scaled(step, Form(recipe, compiled), gpu)

    def basis(self, gpu: GpuSpec, recipe: Recipe, *, compiled: bool) -> Literal["measured", "modelled"]:
        """Return how the time of a row is known."""
        timed = self.measured and self.measured.gpu == gpu and Form(recipe, compiled) in self.measured.ratios
        return "measured" if timed else "modelled"


def rows(facts: Facts, gpus: Sequence[str], options: Options) -> tuple[Row, ...]:
    """Estimate every recipe on every GPU. Raises `UserError` for what cannot be planned."""
    share = share_of(in_bf16(facts), options.checked())
    own = options_for(facts, {})
    job = Job(share, options, measured(facts, own))
    found = [row for name in gpus for row in _of_gpu(job, gpu_spec(name))]
    if options.step_ms is not None:
        found = _rescaled(found, options.step_ms)
    return tuple(found)


def _rescaled(found: list[Row], measured: float) -> list[Row]:
    """Scale all times, so that BF16 on the first GPU takes as long as it was measured."""
    base = next((each.bf16_step_ms for each in found if each.bf16_step_ms), None)
    if base is None:
        return found
    scale = measured / base

    def scaled(row: Row) -> Row:
        if row.step_ms is None or row.bf16_step_ms is None:
            return row
        tokens = {
            name: value / scale
            for name in ("tokens_per_s", "bf16_tokens_per_s")
            if (value := getattr(row, name))
        }
        times = {name: getattr(row, name) * scale for name in ("step_ms", "bf16_step_ms")}
        parts = {
            name: {part: ms * scale for part, ms in getattr(row, name).items()}
            for name in ("parts_ms", "bf16_parts_ms")
        }
        return msgspec.structs.replace(row, **tokens, **times, **parts)

    return [scaled(row) for row in found]


def wanted(options: Options) -> Iterator[Recipe]:
    """List the recipes that were asked for. Raises `UserError` for an unknown one."""
    stacks = [STACKS[options.stack]] if options.stack else list(STACKS.values())
    every = [each for stack in stacks for each in of_stack(stack) if each.name != "custom"]
    found = [each for each in every if options.recipe in ("all", each.name)]
    if not found:
        known = ", ".join(dict.fromkeys(each.name for each in every))
        raise UserError(f"--recipe {options.recipe} is not known; known are all, {known}")
    return iter(found)


def recipe_of(row: Row) -> Recipe:
    """Look up the recipe of a row."""
    return RECIPES[(STACKS[row.stack], row.recipe)]


def _of_gpu(job: Job, gpu: GpuSpec) -> Iterator[Row]:
    """Estimate the recipes on one GPU, each beside BF16 in the same framework."""
    for stack, recipes in groupby(wanted(job.options), lambda recipe: recipe.stack):
        forms = {compiled: job.step(gpu, None, stack=stack, compiled=compiled) for compiled in (True, False)}
        known = [each for each in forms.values() if each is not None]
        bf16 = min(known, key=lambda each: each.ms, default=None)
        compiled_bf16 = bf16 is None or bf16 is forms[True]
        for recipe in recipes:
            row = _row(job, gpu, recipe, True, bf16, compiled_bf16)
            yield row
            if row.step_ms is not None and not recipe.only_compiled:
                yield _row(job, gpu, recipe, False, bf16, compiled_bf16)


def _row(
    job: Job,
    gpu: GpuSpec,
    recipe: Recipe,
    compiled: bool,
    bf16: Step | None,
    compiled_bf16: bool,
) -> Row:
    share, options = job.share, job.options
    stack = next(name for name, each in STACKS.items() if each == recipe.stack)
    peak = peak_of(share, options, gpu, recipe, compiled=compiled).gib
    base: dict[str, Any] = {
        "gpu": gpu.name,
        "stack": stack,
        "recipe": recipe.name,
        "compiled": compiled,
        "gpu_memory_gib": gpu.memory_gib,
        "bf16_memory_gib": peak_of(share, options, gpu, None, compiled=compiled_bf16).gib,
        "bf16_step_ms": bf16 and bf16.ms,
        "bf16_tokens_per_s": bf16 and tokens_per_s(options, bf16.ms),
        "bf16_parts_ms": _rounded(bf16) if bf16 else {},
        "bf16_limits": limits(bf16) if bf16 else (),
        "bf16_largest_batch": largest_batch(share, options, gpu, None, compiled=compiled_bf16),
    }
    if gpu.fp8_tflops is None:
        return Row(**base, why="the GPU has no FP8 tensor cores")
    if not runs_on(recipe, capability_of(gpu)):
        return Row(**base, why="does not run there")
    base |= {
        "memory_gib": peak,
        "fits": peak <= USABLE * gpu.memory_gib,
        "largest_batch": largest_batch(share, options, gpu, recipe, compiled=compiled),
    }
    step = job.step(gpu, recipe, stack=recipe.stack, compiled=compiled)
    if step is None or bf16 is None:
        return Row(**base, why="casts not measured" if bf16 else "a part of the model has no numbers")
    balanced = bf16.in_balance or step.in_balance
    speedup, off = bf16.ms / step.ms, margin(recipe, gpu, compiled=compiled, in_balance=balanced)
    return Row(
        **base,
        step_ms=step.ms,
        speedup=speedup,
        speedup_low=speedup / (1 + off),
        speedup_high=speedup / (1 - off),
        tokens_per_s=tokens_per_s(options, step.ms),
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
