"""Derive the constants of `fp8doctor.cost` from a sweep: ``python research/benchmarks/calibrate_cost.py
[SWEEP.json]``

Prints each constant as it is and as the sweep of `gemm_sweep.py` has it (default: that in measured/), then
how far the model of a GEMM is off before and after, beside torchao's roofline on the same shapes. Of a sweep
with ``--only grid`` it prints casts and matmuls by recipe. It changes no file: a constant is taken over by
hand, with the sweep named as its source, and `cost_model.py` then says what that does to whole steps.

The sweep runs back to back, at the clock that the power limit leaves; `matmuls.IN_A_STEP` comes from kernel
times of whole steps. Casts were timed alone: in a step they are fused with their neighbours. What a sweep
does not hold is left out, and short times hold the host's launches where ``not_captured`` is not empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor import gpus
from fp8doctor.cost import matmuls, step_cost
from fp8doctor.cost.layer import layer_casts_ms
from fp8doctor.cost.matmuls import NoNumbers, matmuls_ms
from fp8doctor.gpus import gpu_spec
from fp8doctor.recipes import RECIPES, TORCHAO, of_stack
from research.benchmarks.measured_steps import gemm_errors, gemm_rows
from tests.recordings import text_of

SWEEP = Path(__file__).resolve().parent / "measured" / "h200_sweep.json.gz"

EFFICIENCIES = ("GEMM_EFFICIENCY_BF16", "GEMM_EFFICIENCY_FP8", "UNALIGNED")
"""What is fitted beside the tile's part of `matmuls.BACK_TO_BACK`."""

STEPS = (1.2, 1.05, 1.01)
"""Factors that the fit tries up and down, coarse to fine."""


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SWEEP
    if not path.exists():
        print(f"no sweep at {path}: run research/benchmarks/gemm_sweep.py on a GPU first", file=sys.stderr)
        return 1
    sweep = json.loads(text_of(path))
    gpu = gpu_spec(sweep["gpu"].removeprefix("NVIDIA ")) if sweep["gpu"] != "none" else gpu_spec("H200")
    versions = f"torch {sweep['versions']['torch']} · torchao {sweep['versions']['torchao']}"
    print(
        f"{sweep['gpu']} · {sweep['date']} · {versions} · left out {sweep['left_out']} · not captured "
        f"{sweep.get('not_captured')}\n"
    )
    if sweep.get("grid"):
        print(tabulate(of_grid(sweep, gpu), GRID_HEADER, tablefmt="github", disable_numparse=True))
        return 0
    lines = [*simple(sweep, gpu), *cast_bytes(sweep, gpu)]
    before = gemm_errors(sweep, gpu)
    lines += fitted(sweep, gpu)
    print(tabulate(lines, ("constant", "now", "from the sweep"), tablefmt="github", disable_numparse=True))
    print("\nMean error of a GEMM\n")
    after = {label: ours for label, _, ours, _ in gemm_errors(sweep, gpu)}
    table = [
        (label, count, share(ours), share(after[label]), share(theirs))
        for label, count, ours, theirs in before
    ]
    print(
        tabulate(
            table, ("GEMMs", "count", "now", "fitted", "torchao"), tablefmt="github", disable_numparse=True
        )
    )
    return 0


GRID_HEADER = (
    "module",
    "recipe",
    "cells",
    "bytes now",
    "bytes from the grid",
    "casts, modelled / measured",
    "FP8 matmuls, modelled / measured",
    "their speedup, modelled / measured",
    "BF16 / FP8 time, modelled / measured",
)


def of_grid(sweep: dict[str, Any], gpu: gpus.GpuSpec) -> Iterator[tuple[str, ...]]:
    """Layers of `gemm_sweep.GRID`: casts and matmuls of each recipe, with the constants as they are.

    Casts are what an FP8 layer takes beside its matmuls, less what the BF16 layer does. Bytes per element
    of activations and weights are the least squares of their relative error, cells above `SETTLED_MS` only.
    """
    cells: dict[tuple[str, str], dict[tuple[int, int, int], list[Any]]] = {}
    for module, recipe, m, k, n, *times in sweep["grid"]:
        cells.setdefault((module, recipe), {})[m, k, n] = times
    effective = gpu.memory_tb_s * 1e9 * gpus.MEMORY_EFFICIENCY
    for (module, name), found in cells.items():
        plain = cells.get((module, "bf16"), {})
        stack = "torchao" if module.startswith("torch") else "transformer_engine"
        recipe = RECIPES.get((stack, name))
        shapes = [shape for shape in found if shape in plain and found[shape][1] is not None]
        if recipe is None or not shapes:
            continue
        products = 3 if module.endswith("mlp") else 1
        rows, casts, matmuls, speedups, gains = [], [], [], [], []
        for m, k, n in shapes:
            fp8, in_16bit, rest = found[m, k, n][1:4]
            plain_matmul, plain_rest = plain[m, k, n][2:4]
            modelled, in_bf16 = (products * sum(matmuls_ms(m, k, n, gpu, each)) for each in (recipe, None))
            cast, casts_ms = rest - plain_rest, math.nan
            with contextlib.suppress(NoNumbers):
                casts_ms = products * layer_casts_ms(recipe, m, k, n, gpu, compiled=True)
            matmuls.append(modelled / (fp8 + in_16bit))
            speedups.append(in_bf16 / plain_matmul / matmuls[-1])
            if cast > SETTLED_MS:
                rows.append((products * m * (k + n), products * k * n, cast * effective))
                casts.append(casts_ms / cast)
            both = (in_bf16 + plain_rest) / (modelled + casts_ms + plain_rest)
            gains.append(both / ((plain_matmul + plain_rest) / (fp8 + in_16bit + rest)))
        of_now = recipe.cast_bytes
        yield (
            module,
            name,
            str(len(shapes)),
            f"{of_now.activation:.1f}, {of_now.weight:.1f}" if of_now else "none",
            "{:.1f}, {:.1f}".format(*least_squares(rows)) if len(rows) > 1 else "",
            spread(casts),
            spread(matmuls),
            spread(speedups),
            spread(gains),
        )


SETTLED_MS = 0.1
"""Ms. Shorter casts are launches: those of a `te.Linear` are 7 kernels or more, of 5 microseconds each."""


def least_squares(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Solve a * x + b * y = z for the smallest relative error, neither below 0."""
    xx = xy = yy = x1 = y1 = 0.0
    for x, y, z in rows:
        xx, xy, yy = xx + (x / z) ** 2, xy + x * y / z**2, yy + (y / z) ** 2
        x1, y1 = x1 + x / z, y1 + y / z
    determinant = xx * yy - xy * xy
    a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    if a < 0:
        return 0.0, y1 / yy
    return (a, b) if b >= 0 else (x1 / xx, 0.0)


def spread(values: list[float]) -> str:
    """Median and extremes."""
    known = sorted(each for each in values if not math.isnan(each))
    if not known:
        return ""
    return f"{statistics.median(known):.2f} ({known[0]:.2f} to {known[-1]:.2f})"


def simple(sweep: dict[str, Any], gpu: gpus.GpuSpec) -> list[tuple[str, str, str]]:
    """Constants that one group of measurements gives directly."""
    parts: dict[str, list[list[Any]]] = {}
    for name, *row in sweep["parts"]:
        parts.setdefault(name, []).append(row)
    peak_bytes = gpu.memory_tb_s * 1e9
    effective = peak_bytes * gpus.MEMORY_EFFICIENCY

    found: list[tuple[str, float, float]] = []
    if "copy" in parts:
        copied, ms = max(parts["copy"])
        found.append(("gpus.MEMORY_EFFICIENCY", gpus.MEMORY_EFFICIENCY, 4 * copied / ms / peak_bytes))
    for name, constant, now in (
        ("adamw torch.bfloat16", "step_cost.OPTIMIZER_BYTES", step_cost.OPTIMIZER_BYTES),
        ("loss fp32", "step_cost.LOSS_BYTES fp32", step_cost.LOSS_BYTES["fp32"]),
        ("loss 16bit", "step_cost.LOSS_BYTES 16bit", step_cost.LOSS_BYTES["16bit"]),
    ):
        if name in parts:
            elements, ms = max(parts[name])
            found.append((constant, now, ms * effective / elements))
    for kind, m, k, n, burst, sustained, *_ in sweep["clocks"]:
        found.append(
            (
                f"matmuls.BACK_TO_BACK clock ({kind} at {(m, k, n)})",
                matmuls.BACK_TO_BACK.clock,
                burst / sustained,
            )
        )
    for width, efficiency in step_cost.ATTENTION_EFFICIENCY.items():
        rates = [
            4
            * batch
            * heads
            * length**2
            * head
            * (0.5 if causal else 1.0)
            * (1 + step_cost.BACKWARD_OF_ATTENTION)
            / both
            / (gpu.bf16_tflops * 1e9)
            for batch, heads, length, head, causal, _, both in parts.get("attention", ())
            if head == width
        ]
        if rates:
            found.append(
                (
                    f"step_cost.ATTENTION_EFFICIENCY {width} ({min(rates):.2f} to {max(rates):.2f})",
                    efficiency,
                    statistics.median(rates),
                )
            )
    host = {name: ms for name, _, _, ms in sweep["host"]}
    if {"linear", "float8", "float8 compiled"} <= host.keys():
        found.append(
            ("recipes.TORCHAO.eager.host_ms", TORCHAO.eager.host_ms, host["float8"] - host["linear"])
        )
        found.append(
            (
                "recipes.TORCHAO.compiled.host_ms",
                TORCHAO.compiled.host_ms,
                host["float8 compiled"] - host["linear"],
            )
        )
    return [(name, f"{now:.4g}", f"{then:.4g}") for name, now, then in found]


def cast_bytes(sweep: dict[str, Any], gpu: gpus.GpuSpec) -> list[tuple[str, str, str]]:
    """Effective bytes per element of torchao's casts: of the largest tensor, where launches count least."""
    effective = gpu.memory_tb_s * 1e9 * gpus.MEMORY_EFFICIENCY
    largest = max((rows * columns for *_, rows, columns, _ in sweep["casts"]), default=0)
    measured = {
        (recipe, role, direction, mode): ms * effective / largest
        for recipe, role, direction, mode, rows, columns, ms in sweep["casts"]
        if rows * columns == largest
    }
    one = [
        value
        for (recipe, role, _, mode), value in measured.items()
        if mode == "eager" and recipe == "tensorwise" and role in ("input", "weight")
    ]
    now = TORCHAO.eager_cast_bytes
    assert now
    found = (
        [
            (
                "recipes.TORCHAO.eager_cast_bytes",
                f"{now.activation:.1f}, {now.weight:.1f}",
                f"{2 * statistics.mean(one):.1f}",
            )
        ]
        if one
        else []
    )
    after = measured.get(("rowwise", "rescale of a gradient", "backward", "compiled"), 0.0)
    for recipe, bytes_now in [
        (each.name, each.cast_bytes) for each in of_stack("torchao") if each.cast_bytes
    ]:
        parts = {role: total(measured, recipe, role) for role in ("input", "gradient", "weight")}
        if None in parts.values():
            continue
        extra = {"rowwise": after, "rowwise_with_gw_hp": after}.get(
            recipe, 0.0
        )  # the input gradient has as many elements as the input
        activation = statistics.mean((parts["input"] + extra, parts["gradient"]))
        weight = parts["weight"] + (after if recipe == "rowwise" else 0.0)
        found.append(
            (
                f"recipes.RECIPES[torchao, {recipe}].cast_bytes",
                f"{bytes_now.activation:.1f}, {bytes_now.weight:.1f}",
                f"{activation:.1f}, {weight:.1f}",
            )
        )
    return found


def total(measured: dict[tuple[str, ...], float], recipe: str, role: str) -> Any:
    """All compiled casts of one role in a step; None where none was measured."""
    parts = [
        value
        for (name, of, _, mode), value in measured.items()
        if (name, of, mode) == (recipe, role, "compiled")
    ]
    return sum(parts) if parts else None


def fitted(sweep: dict[str, Any], gpu: gpus.GpuSpec) -> list[tuple[str, str, str]]:
    """The constants of `fp8doctor.cost.matmuls` that bring the sweep nearest, one after the other; they stay
    set in this process."""
    start = {name: getattr(matmuls, name) for name in EFFICIENCIES}
    pace = matmuls.BACK_TO_BACK
    factors = dict.fromkeys((*EFFICIENCIES, "tile_ms"), 1.0)
    rows = list(gemm_rows(sweep))

    def error() -> float:
        for name in EFFICIENCIES:
            setattr(matmuls, name, start[name] * factors[name])
        matmuls.BACK_TO_BACK = pace._replace(tile_ms=pace.tile_ms * factors["tile_ms"])
        matmuls.gemm_ms.cache_clear()
        times = (
            (matmuls.gemm_ms(*shape, gpu, fp8=kind != "bf16", pace=matmuls.BACK_TO_BACK), ms)
            for kind, _, shape, ms in rows
        )
        return statistics.mean(abs(math.log(modelled / ms)) for modelled, ms in times)

    descend(error, factors)
    found = [(name, f"{start[name]:.4g}", f"{start[name] * factors[name]:.4g}") for name in EFFICIENCIES]
    return [
        *found,
        ("matmuls.BACK_TO_BACK tile_ms", f"{pace.tile_ms:.4g}", f"{pace.tile_ms * factors['tile_ms']:.4g}"),
    ]


def descend(error: Callable[[], float], factors: dict[str, float]) -> None:
    """Coordinate descent: every factor up or down by ever smaller steps while that helps."""
    best = error()
    for factor in STEPS:
        improved = True
        while improved:
            improved = False
            for name in factors:
                for change in (factor, 1 / factor):
                    kept = factors[name]
                    factors[name] = kept * change
                    found = error()
                    if found < best - 1e-6:
                        best, improved = found, True
                    else:
                        factors[name] = kept
    error()


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
