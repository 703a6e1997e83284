"""Experts of an H200 beside the cost model: ``python research/benchmarks/grouped.py``

Prints Markdown. measured/h200_grouped.json.gz has a forward and backward of one expert weight in torch's
grouped matmul, torchao's rowwise one and ``te.GroupedLinear`` (November 2026, one H200, torch 2.11, torchao
0.18, Transformer Engine 2.20.2; equal shares of the rows, and shares of 1/rank). Busy is the time in which a
kernel of one call ran.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fp8doctor.cost.layer import Call, layer_ms
from fp8doctor.facts import Linear
from fp8doctor.gpus import gpu_spec

MEASURED = Path(__file__).resolve().parent / "measured" / "h200_grouped.json.gz"

STACKS = {"torch": "torch", "torchao": "torchao", "te.GroupedLinear": "transformer_engine"}


class Expert(NamedTuple):
    """One expert weight in one form, in ms."""

    shape: str
    split: str
    what: str
    busy_ms: float
    """Measured."""
    modelled_ms: float
    wall_ms: float
    """Measured, of calls in a row: the slower of GPU and host."""
    bf16: str
    """The form in BF16 that it stands beside."""

    @property
    def error(self) -> float:
        return self.modelled_ms / self.busy_ms - 1


def experts() -> Iterator[Expert]:
    for row in json.loads(gzip.decompress(MEASURED.read_bytes()))["times"]:
        by, recipe = row["what"].split(maxsplit=1)
        if by not in STACKS:
            continue
        fp8 = recipe != "bf16"
        linear = Linear(
            name="experts",
            kind="",
            stack=STACKS[by],
            use="training" if fp8 else "none",
            recipe=recipe if fp8 else None,
            features={},
            in_features=row["k"],
            out_features=row["n"],
            gemms=row["experts"],
            bias=False,
            dtype="bfloat16",
            requires_grad=True,
            role="experts",
            adapter=None,
            compiled="",
            checkpointed=None,
        )
        times = layer_ms(Call(linear, row["rows"]), gpu_spec("H200"), "compiled")
        yield Expert(
            row["shape"],
            row["split"],
            row["what"],
            row["busy_ms"] - _of_other_modules(row),
            sum(times.values()) - times["pointwise"],
            min(row["ms"]),
            "te.GroupedLinear bf16" if by.startswith("te") else "torch bf16",
        )


def _of_other_modules(row: dict[str, object]) -> float:
    """Time of delayed scaling's update, which the process ran for all modules that it had."""
    top = row["top"]
    assert isinstance(top, list)
    return sum(ms for name, ms, _ in top if "amax_and_scale_update" in name)


def main() -> None:
    rows = list(experts())
    bf16 = {(each.shape, each.split, each.what): each for each in rows}
    table = [
        (
            each.shape,
            each.split,
            each.what,
            f"{each.busy_ms:.2f}",
            f"{each.modelled_ms:.2f}",
            f"{100 * each.error:+.0f} %",
            f"{other.busy_ms / each.busy_ms:.2f}",
            f"{other.modelled_ms / each.modelled_ms:.2f}",
            f"{each.wall_ms:.1f}",
        )
        for each in rows
        for other in [bf16[each.shape, each.split, each.bf16]]
    ]
    header = ("experts", "rows", "form", "busy ms", "modelled", "error", "BF16 /", "modelled", "wall ms")
    print(tabulate(table, header, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
