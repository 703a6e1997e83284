"""The rows of a plan: every GPU, stack and recipe, with time, range, memory and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from fp8doctor.analysis.layers import FP8_MULTIPLE
from fp8doctor.analysis.memory import USABLE
from fp8doctor.analysis.modelled_speedup import OFF_IN_BALANCE, margin
from fp8doctor.analysis.significance import EVEN
from fp8doctor.cost.matmuls import NoNumbers
from fp8doctor.cost.step_cost import in_bf16
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Record
from fp8doctor.facts.arm_names import BF16_BASELINES
from fp8doctor.gpus import GpuSpec, gpu_specs, modelled_gpu
from fp8doctor.planning.form import Form, Step
from fp8doctor.planning.job_options import STACKS, Options, Share, options_for, share_of
from fp8doctor.recipes import RECIPES, Recipe, of_stack, runs_on

LIMITING = 0.10
"""Share of the FP8 step from which a part counts as a limit. A convention."""

MOST_SAMPLES = 1 << 16
"""Largest batch that is shown. A choice of this tool."""


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

    @property
    def of(self) -> Recipe:
        return RECIPES[(STACKS[self.stack], self.recipe)]

    @property
    def name(self) -> str:
        return self.recipe if self.stack == "torchao" else f"{self.stack} {self.recipe}"

    @property
    def words(self) -> str:
        """Name the recipe in words, with its name in the table if that is another one."""
        named = self.of.words or self.of.name
        named = named if self.stack == "torchao" else f"Transformer Engine's {named}"
        return named if named == self.name else f"{named} ({self.name})"

    @property
    def gives(self) -> str:
        return f"{self.speedup:.2f}x ({self.speedup_low:.2f} to {self.speedup_high:.2f})"

    @property
    def gains_nothing(self) -> bool:
        """Return whether no speedup of the range pays; a range on both sides of 1 is open."""
        return (self.speedup_high or 0.0) < 1 + EVEN

    def is_doubtful(self, among: Sequence[Row]) -> bool:
        """Return whether FP4, which costs exactness, is not clearly faster than one of these in FP8."""
        fp8 = [each.speedup or 0.0 for each in among if not each.of.in_fp4]
        return self.of.in_fp4 and max(fp8, default=0.0) > (self.speedup_low or 0.0)


def rows(facts: Facts, gpus: str | Sequence[str], options: Options) -> tuple[Row, ...]:
    """Estimate every recipe on every GPU. Raises `UserError` for what cannot be planned."""
    plain, specs, scale = in_bf16(facts), gpu_specs(gpus), 1.0
    share = share_of(plain, options)
    timed_as, gpu, step_ms = options, specs[0], options.step_ms
    if step_ms is None and (known := modelled_gpu(facts)):
        timed_as, gpu, step_ms = options_for(facts, {}), known, measured_bf16_ms(facts)
    if step_ms:
        base = _step(Form(share_of(plain, timed_as), timed_as, gpu, wanted(timed_as)[0].stack))
        if base is None and options.step_ms:
            raise UserError(f"--step-ms scales estimates of the first GPU, and {gpu.name} has none")
        scale = step_ms / base.ms if base else 1.0
    return tuple(row for gpu in specs for row in _of_gpu(share, options, gpu, scale))


def _step(form: Form) -> Step | None:
    try:
        return form.step()
    except NoNumbers:
        return None


def measured_bf16_ms(facts: Facts) -> float | None:
    """Return the best BF16 step that a report measured reliably on a known GPU."""
    trial = facts.get("trial")
    if not trial or trial.get("device") != "cuda" or not trial.get("reliable") or not modelled_gpu(facts):
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


def _of_gpu(share: Share, options: Options, gpu: GpuSpec, scale: float) -> Iterator[Row]:
    """Estimate the recipes on one GPU, each next to BF16 in the same framework."""
    for stack, recipes in groupby(wanted(options), lambda recipe: recipe.stack):
        plain = Form(share, options, gpu, stack, scale=scale)
        bf16, short = _step(plain), next(name for name, each in STACKS.items() if each == stack)
        row = Row(gpu=gpu.name, stack=short, recipe="", gpu_memory_gib=gpu.memory_gib)
        row = replace(row, **{f"bf16_{name}": value for name, value in _side(plain, bf16).items()})
        for recipe in recipes:
            yield _row(replace(plain, recipe=recipe), replace(row, recipe=recipe.name), bf16, recipe)


def _row(form: Form, row: Row, bf16: Step | None, recipe: Recipe) -> Row:
    gpu, layers = form.gpu, form.share.layers
    if gpu.fp8_tflops is None:
        return replace(row, why="the GPU has no FP8 tensor cores")
    if not runs_on(recipe, gpu.capability):
        return replace(row, why="it does not run there")
    if not any(map(form.converts, layers)):
        odd = sorted({each.rows for each in layers if each.rows % FP8_MULTIPLE})
        why = f"{odd[-1]:,} rows are no multiple of {FP8_MULTIPLE}, so " if odd else ""
        return replace(row, why=f"{why}it converts no layer of this model")
    step, why = None, "a part of the model has no numbers"
    if bf16:
        try:
            step = form.step()
        except NoNumbers as missing:
            why = str(missing)
    row = replace(row, **_side(form, step))
    row = replace(row, fits=(row.memory_gib or 0.0) <= USABLE * gpu.memory_gib)
    if bf16 is None or step is None:
        return replace(row, why=why)
    balanced = bf16.in_balance or step.in_balance
    speedup, off = bf16.ms / step.ms, max(OFF_IN_BALANCE * balanced, margin(recipe, gpu))
    return replace(row, speedup=speedup, speedup_low=speedup / (1 + off), speedup_high=speedup / (1 - off))


def _side(form: Form, step: Step | None) -> dict[str, Any]:
    """Write the fields of a row that BF16 has too: memory, and the step's times if they are known."""
    options, peak = form.options, form.peak()
    samples = peak.samples(form.gpu.memory_gib, options.batch) or 0
    found = {"memory_gib": peak.gib, "largest_batch": min(MOST_SAMPLES, samples)}
    if step is None:
        return found
    tokens = options.batch * options.seq * options.dp * options.accumulate / options.gpus
    limiting = {part: ms for part, ms in step.parts.items() if part != "matmuls" and ms >= LIMITING * step.ms}
    return found | {
        "step_ms": step.ms,
        "tokens_per_s": tokens / step.ms * 1e3,
        "limits": tuple(sorted(limiting, key=lambda part: -limiting[part])),
        "parts_ms": {part: round(ms, 3) for part, ms in step.parts.items() if ms},
    }
