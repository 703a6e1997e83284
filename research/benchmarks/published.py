"""Published jobs, beside what `fp8doctor plan` says of them: ``python research/benchmarks/published.py``

Prints Markdown, needs no GPU, and exits with 1 if a bound is missed. published.json holds every row that the
collection of published BF16 and FP8 figures has: jobs that a plan can express, with the options that it is
asked with; parts of a step, which the cost model alone can express; and the rest, with the reason.

A group is one baseline or sweep: it counts once in every mean, whatever the number of its rows. Megatron and
JAX jobs are asked as Transformer Engine's delayed scaling with compiled layers, since Megatron fuses norms
and activations and XLA fuses all. So are the kernels of llmq, which have no stack of their own: they cast
once, and the kernel before takes the maximum. What else was assumed is in `ASSUMED`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.analysis.memory import USABLE
from fp8doctor.analysis.modelled_speedup import gpu_class
from fp8doctor.cost.layer import layer_casts_ms
from fp8doctor.cost.matmuls import BACK_TO_BACK, scaled_gemm_ms
from fp8doctor.facts import Facts
from fp8doctor.gpus import gpu_spec
from fp8doctor.planned import facts_of as planned_facts
from fp8doctor.planning.estimates import rows as planned
from fp8doctor.planning.job_options import STACKS, Options
from fp8doctor.recipes import RECIPES, Recipe

PUBLISHED = Path(__file__).resolve().with_name("published.json")

MEAN_ERROR, RIGHT_SIGNS, IN_RANGE, RIGHT_ORDER = 0.08, 0.95, 0.90, 0.90
"""Targets: mean error of the speedup and signs of torch, Megatron and JAX jobs on Hopper; published speedups
inside the printed range, by group; order of recipes that differ by more than `DIFFERENT`."""

DIFFERENT = 0.03

TRAINING = ("torch", "Megatron", "JAX")

ASSUMED = {
    "dgxc-h100": "nothing is recomputed, zero1, delayed scaling; gradients in BF16, as NeMo's performance "
    "recipes set it (grad_reduce_in_fp32)",
    "dgxc-h100-maxtext70b": "full rematerialization, which the published BF16 time implies",
    "dgxc-h100-lora": "rank 8 on query, key and value, as NeMo's finetune_performance_optimizations sets it",
    "dgxc-h100-maverick, mlm-qwen3-30b-h100": "no CUDA graphs, which the published FP8 alone has",
    "mbridge-deepseekv3-gb300": "nothing is recomputed",
    "dgxc-gb200": "as on H100; the README does not name the recipe",
    "llmq": "no recomputation, the loss in place of the logits; BF16 may have had another micro-batch",
    "gpt, nemotron, mpt": "no biases; heads as wide as the model's width divided by their number",
}

EXPLAINED = {
    "mosaic-h100-mpt3b": "an attention of 2023: the longer the sequence, the longer its BF16 step takes than "
    "the plan's, up to 2.1 times, so FP8 gains less",
    "dgxc-h100-lora-llama70b": "on 32 GPUs: published steps grow from 6.5 to 7.6 s, in FP8 alone",
}
"""Group -> why its published speedup lies outside of the printed range."""

OFFLOADED = "llmq can offload, recompute and shorten moments; its table does not say what it did"

TOO_LARGE = {
    "dgxc-h100-lora-llama70b": f"below the memory, but a plan calls a GPU full above {USABLE:.0%}",
    "mosaic-h100-mpt3b": "its trainer divides a micro-batch that does not fit",
    "llmq-h100": OFFLOADED,
    "llmq-h100x8": OFFLOADED,
    "llmq-l40s": OFFLOADED,
}
"""Group -> why the plan says that jobs of it do not fit, which ran."""


@dataclass(frozen=True)
class Replayed:
    """One published job and its plan."""

    id: str
    group: str
    kind: str
    gpu: str
    stack: str
    recipe: str
    published: float
    published_ms: float
    """BF16."""
    modelled: float
    modelled_ms: float
    low: float
    high: float
    fits: bool | None
    peak_gib: float | None
    """Estimated, in FP8."""

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1

    @property
    def has_right_sign(self) -> bool:
        """Whether faster and slower agree; a published difference below `DIFFERENT` has no sign."""
        return abs(self.published - 1) < DIFFERENT or (self.modelled > 1) == (self.published > 1)

    @property
    def is_in_range(self) -> bool:
        return self.low <= self.published <= self.high

    @property
    def granularity(self) -> str:
        return RECIPES[STACKS[self.stack], self.recipe].granularity

    @property
    def label(self) -> tuple[str, str, str, str]:
        """Kind of job, recipe and GPU class that its table is of."""
        return self.kind, self.stack, self.recipe, gpu_class(gpu_spec(self.gpu))


def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PUBLISHED.read_text("utf-8"))
    return found


def jobs() -> Iterator[dict[str, Any]]:
    """Every job with the fields that its group shares."""
    for group in published()["jobs"]:
        yield from _unfolded(group)


def parts() -> Iterator[dict[str, Any]]:
    for group in published()["parts"]:
        yield from _unfolded(group)


def _unfolded(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in group["rows"]:
        options = group.get("options", {}) | row.get("options", {})
        yield {**group, **row, "options": options, "id": f"{group['group']}/{row['id']}"}


@cache
def facts_of(model: str) -> Facts:
    """What examining a model finds, built on the meta device."""
    return planned_facts(published()["models"][model], None, None)


def replay(job: dict[str, Any]) -> Replayed:
    """Plan one job."""
    given = {name: tuple(each) if isinstance(each, list) else each for name, each in job["options"].items()}
    options = Options(**given, stack=job["stack"], recipe=job["recipe"])
    row = planned(facts_of(job["model"]), [job["gpu"]], options)[0]
    assert row.speedup is not None, (job["id"], row.why)
    assert row.speedup_low is not None
    assert row.speedup_high is not None
    assert row.bf16_step_ms is not None
    return Replayed(
        job["id"],
        job["group"],
        job["kind"],
        job["gpu"],
        job["stack"],
        job["recipe"],
        job["speedup"],
        step_ms(job, options),
        row.speedup,
        row.bf16_step_ms,
        row.speedup_low,
        row.speedup_high,
        row.fits,
        row.memory_gib,
    )


def step_ms(job: dict[str, Any], options: Options) -> float:
    """Return the published BF16 step; rates are of one GPU, or of the job's."""
    if job["unit"] == "s/step":
        return 1e3 * float(job["bf16"])
    tokens = options.batch * options.seq * options.dp * options.accumulate
    if job["unit"] == "TFLOP/s/GPU":
        return tokens * float(job["flops_per_token"]) / options.gpus / float(job["bf16"]) / 1e9
    return 1e3 * tokens / (options.gpus if "GPU" in job["unit"] else 1) / float(job["bf16"])


def by_group(rows: Iterable[Replayed], value: Callable[[Replayed], float]) -> list[float]:
    """Return each group's mean."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(value(row))
    return [statistics.mean(each) for each in groups.values()]


def summary(label: Sequence[str], rows: list[Replayed]) -> tuple[str, ...]:
    """One line of the table of errors."""
    errors = by_group(rows, lambda row: abs(row.error))
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        *label,
        f"{len(errors)} ({len(rows)})",
        percent(statistics.mean(errors), sign=False),
        percent(statistics.mean(by_group(rows, lambda row: row.error))),
        f"{percent(worst.error)} {worst.id}",
        percent(statistics.mean(by_group(rows, lambda row: row.has_right_sign)), sign=False),
        percent(statistics.mean(by_group(rows, lambda row: row.is_in_range)), sign=False),
    )


SUMMARY = ("groups (rows)", "mean error", "bias", "worst", "right sign", "in the range")


@dataclass(frozen=True)
class Part:
    """Published matmuls of Transformer Engine, one recipe, and the same modelled back to back."""

    id: str
    group: str
    gpu: str
    recipe: str
    what: str
    published: float
    modelled: float
    bf16_ms: float
    modelled_bf16_ms: float

    @property
    def error(self) -> float:
        return self.modelled / self.published - 1


def replayed_parts() -> Iterator[Part]:
    for part in parts():
        bf16, scaled = part_ms(part, None), part_ms(part, RECIPES["transformer_engine", part["recipe"]])
        yield Part(
            part["id"],
            part["group"],
            part["gpu"],
            part["recipe"],
            part["what"],
            part["speedup"],
            bf16 / scaled,
            part["bf16_ms"],
            bf16,
        )


def part_ms(part: dict[str, Any], recipe: Recipe | None) -> float:
    """Model the matmuls, with casts if they were timed; a forward casts input and weight."""
    gpu, m, total = gpu_spec(part["gpu"]), part["tokens"], 0.0
    forward = part["what"].startswith("forward")
    for k, n in part["shapes"]:
        for shape in [(m, k, n), (m, n, k), (k, m, n)][: 1 if forward else 3]:
            total += scaled_gemm_ms(*shape, gpu, recipe, pace=BACK_TO_BACK)
        if recipe and "casts" in part["what"]:
            casts = layer_casts_ms(recipe, m, k, n, gpu, compiled=False)
            cast = m * k + k * n
            total += casts * (cast / (cast + m * n) if forward else 1.0)
    return float(total * part["layers"])


@dataclass(frozen=True)
class Pair:
    """Two recipes of one baseline whose published speeds differ."""

    group: str
    recipes: tuple[str, str]
    published: float
    """Speed of the first / the second."""
    modelled: float

    @property
    def is_right(self) -> bool:
        return (self.published > 1) == (self.modelled > 1)


def pairs(rows: Iterable[Replayed | Part]) -> list[Pair]:
    """Return every pair of recipes of a group that differ by more than `DIFFERENT`."""
    groups: dict[str, list[Replayed | Part]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    found = [
        Pair(group, (a.recipe, b.recipe), a.published / b.published, a.modelled / b.modelled)
        for group, every in groups.items()
        for a, b in combinations(every, 2)
        if a.recipe != b.recipe
    ]
    return [each for each in found if abs(each.published - 1) > DIFFERENT]


def percent(share: float, *, sign: bool = True) -> str:
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


def in_order(ordered: Iterable[Pair]) -> float:
    """Return the share of pairs in the right order, each group counted once."""
    groups: dict[str, list[bool]] = {}
    for pair in ordered:
        groups.setdefault(pair.group, []).append(pair.is_right)
    return statistics.mean(statistics.mean(each) for each in groups.values())


def table(rows: Iterable[Sequence[str]], header: Sequence[str]) -> str:
    return str(tabulate(list(rows), header, tablefmt="github", disable_numparse=True))


def summaries(rows: list[Replayed]) -> list[tuple[str, ...]]:
    """Summarize every kind of job, recipe and GPU class, then what the targets are of."""
    labels = sorted({row.label for row in rows})
    found = [summary(label, [row for row in rows if row.label == label]) for label in labels]
    return [
        *found,
        summary(("training on Hopper", "", "", ""), on_hopper(rows)),
        summary(("all", "", "", ""), rows),
    ]


def on_hopper(rows: Iterable[Replayed]) -> list[Replayed]:
    return [row for row in rows if row.kind in TRAINING and row.label[3] == "Hopper"]


def missed(rows: list[Replayed], ordered: list[Pair]) -> list[str]:
    """Name the targets that do not hold."""
    hopper = on_hopper(rows)
    others = [row for row in rows if row not in hopper]
    found = [
        (statistics.mean(by_group(hopper, lambda row: abs(row.error))) <= MEAN_ERROR, "mean error on Hopper"),
        (statistics.mean(by_group(hopper, lambda row: row.has_right_sign)) >= RIGHT_SIGNS, "signs on Hopper"),
        (statistics.mean(by_group(hopper, lambda row: row.is_in_range)) >= IN_RANGE, "ranges on Hopper"),
        (statistics.mean(by_group(others, lambda row: row.is_in_range)) >= IN_RANGE, "ranges elsewhere"),
        (in_order(ordered) >= RIGHT_ORDER, "order of recipes"),
    ]
    unexplained = {row.group for row in rows if not row.is_in_range} - EXPLAINED.keys()
    unexplained |= {row.group for row in rows if not row.fits} - TOO_LARGE.keys()
    return [what for held, what in found if not held] + [f"{each} is not explained" for each in unexplained]


def main() -> int:
    rows, measured = [replay(job) for job in jobs()], list(replayed_parts())
    ordered = pairs([*rows, *measured])
    print("## Error of the planned speedup\n")
    print(table(summaries(rows), ("job", "stack", "recipe", "GPUs", *SUMMARY)))
    print("\n## Jobs\n")
    header = (
        "job",
        "GPU",
        "recipe",
        "published",
        "planned",
        "error",
        "range",
        "in it",
        "BF16 ms",
        "planned",
        "error",
    )
    print(table(map(job_line, rows), header))
    large = [row for row in rows if not row.fits]
    print(f"\nThe plan says that {len(rows) - len(large)} of these {len(rows)} fit in FP8; all ran.\n")
    print(table(map(large_line, large), ("job", "GPU", "estimated GiB", "of GiB", "cause")))
    print("\n## Published outside of the range\n")
    outside = dict.fromkeys(row.group for row in rows if not row.is_in_range)
    print("\n".join(f"- {group}: {EXPLAINED.get(group, 'not explained')}." for group in outside) or "None.")
    print("\n## Parts: matmuls of Transformer Engine, 15,872 rows\n")
    print(
        table(
            map(part_line, measured),
            ("part", "what", "published", "modelled", "error", "BF16 ms", "modelled"),
        )
    )
    print("\n## Order of recipes\n")
    lines = (
        (
            p.group,
            " / ".join(p.recipes),
            f"{p.published:.2f}",
            f"{p.modelled:.2f}",
            "yes" if p.is_right else "no",
        )
        for p in ordered
    )
    print(table(lines, ("group", "recipes", "published", "estimated", "right")))
    right = sum(p.is_right for p in ordered)
    share = percent(in_order(ordered), sign=False)
    print(f"\n{right} of {len(ordered)} pairs that differ by over 3 % are right, {share} of a group's.")
    print("\n## Assumed\n")
    print("\n".join(f"- {group}: {what}." for group, what in ASSUMED.items()))
    print("\n## Not expressed\n")
    rest = ((", ".join(each["ids"]), each["why"], each["source"]) for each in published()["not_expressed"])
    print(table(rest, ("rows", "why", "source")))
    failed = missed(rows, ordered)
    print("\n" + (f"Missed: {'; '.join(failed)}." if failed else "Every target held."))
    return bool(failed)


def job_line(row: Replayed) -> tuple[str, ...]:
    return (
        row.id,
        row.gpu,
        f"{row.stack} {row.recipe}",
        f"{row.published:.3f}",
        f"{row.modelled:.3f}",
        percent(row.error),
        f"{row.low:.2f} to {row.high:.2f}",
        "yes" if row.is_in_range else "no",
        f"{row.published_ms:,.0f}",
        f"{row.modelled_ms:,.0f}",
        percent(row.modelled_ms / row.published_ms - 1),
    )


def large_line(row: Replayed) -> tuple[str, ...]:
    cause = TOO_LARGE.get(row.group, "not explained")
    return row.id, row.gpu, f"{row.peak_gib:.1f}", f"{gpu_spec(row.gpu).memory_gib:g}", cause


def part_line(part: Part) -> tuple[str, ...]:
    return (
        part.id,
        part.what,
        f"{part.published:.2f}",
        f"{part.modelled:.2f}",
        percent(part.error),
        f"{part.bf16_ms:.2f}",
        f"{part.modelled_bf16_ms:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main())
