"""What ``-v`` adds of the GEMMs one by one: a table, and how much of the step it explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from msgspec import Struct

from fp8doctor.analysis.ledger import Ledger, LedgerLine
from fp8doctor.analysis.step_difference import signed
from fp8doctor.wording import plural

HEADS = ("ms of one matmul, alone", "calls", "BF16", "FP8", "to FP8", "saved", "saved a step")


class LedgerTable(Struct, frozen=True):
    """The table, as it is shown: a row with one cell names the shape of those below it."""

    rows: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]

    @property
    def shapes(self) -> list[tuple[str, list[tuple[str, ...]]]]:
        """Each shape with the rows of its GEMMs."""
        grouped: list[tuple[str, list[tuple[str, ...]]]] = []
        for row in self.rows[1:]:
            if len(row) == 1:
                grouped.append((row[0], []))
            else:
                grouped[-1][1].append(row)
        return grouped


def ledger_table(ledger: Ledger, labels: Mapping[str, str]) -> LedgerTable:
    """Write the ledger; ``labels`` are names of variants as the table of times has them."""
    rows: list[tuple[str, ...]] = []
    for shape, lines in groupby(ledger.lines, _shape):
        rows += [(shape,), *map(_cells, lines)]
    return LedgerTable((HEADS, *rows), tuple(_sentences(ledger, labels)))


def _shape(line: LedgerLine) -> str:
    return f"{line.m} x {line.k} x {line.n} {line.recipe}, {plural(line.layers, 'layer')}"


def _cells(line: LedgerLine) -> tuple[str, ...]:
    in_fp8 = line.fp8_ms is not None
    return (
        f"  {line.layout.replace('_', ' ')}",
        f"{line.calls:,}",
        f"{line.bf16_ms:.3f}",
        f"{line.fp8_ms:.3f}" if in_fp8 else "in BF16",
        f"{line.casts_ms:.3f}" if in_fp8 else "-",
        signed_finely(line.net_ms) if in_fp8 else "-",
        signed(line.step_ms) if in_fp8 else "-",
    )


def signed_finely(ms: float) -> str:
    """Write what one GEMM saves, in thousandths of a millisecond."""
    return f"{'−' if ms < 0 else '+'}{abs(ms):.3f}"


def _sentences(ledger: Ledger, labels: Mapping[str, str]) -> Iterator[str]:
    yield (
        f"Timed alone, the matmuls of {plural(ledger.layers, 'layer')} take {ledger.bf16_ms:,.1f} ms of a "
        f"step in BF16, in FP8 {ledger.fp8_ms:,.1f} and their conversions {ledger.casts_ms:,.1f}: "
        f"{ledger.speedup:.2f}x, saved {signed(ledger.net_ms)} ms."
    )
    fp8, bf16 = ledger.fp8_arm, ledger.bf16_arm
    if fp8 and bf16 and None not in (ledger.step_gemms_saved_ms, ledger.step_casts_ms):
        yield (
            f"In the step matmuls save {signed(ledger.step_gemms_saved_ms or 0.0)} ms "
            f"(alone {signed(ledger.bf16_ms - ledger.fp8_ms)}), and conversions cost "
            f"{ledger.step_casts_ms or 0.0:,.1f} ms (alone {ledger.casts_ms:,.1f}): "
            f"{labels.get(fp8, fp8)}, against {labels.get(bf16, bf16)}. "
            f"Not explained by single layers: {signed(ledger.unexplained_ms or 0.0)} ms."
        )
