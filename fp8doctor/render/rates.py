"""What ``-v`` says of tokens a second: of every variant, and the most that the GPU's peak allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from fp8doctor.analysis.rates import Rates
from fp8doctor.analysis.variant_words import variant


class RateTable(Struct, frozen=True):
    """The same as a table."""

    how: str
    """How the rates are known: measured, or modelled on which GPU."""
    rows: tuple[tuple[str, str, str], ...]
    """Variant, tokens a second, milliseconds of a step."""
    peak: str
    """The most that the GPU's peak allows; empty where that is not known."""


def rate_table(rates: Rates, fp8: bool, labels: Mapping[str, str]) -> RateTable:
    """Write the rates; ``fp8`` says whether the model as it is has FP8 layers, ``labels`` are names of
    variants as the table of times has them."""
    modelled = rates.variants and rates.variants[0].basis == "modelled"
    return RateTable(
        f"modelled on {rates.gpu}" if modelled else "measured",
        tuple(
            dict.fromkeys(
                (
                    labels.get(each.name) or variant(each.name, fp8),
                    _round(each.tokens_per_s),
                    f"{each.step_ms:,.1f}",
                )
                for each in rates.variants
            )
        ),
        _peak(rates),
    )


def rates_in_words(rates: Rates, fp8: bool, labels: Mapping[str, str]) -> Iterator[str]:
    """Write the sentences, as `rate_table` does the rows."""
    table = rate_table(rates, fp8, labels)
    if table.rows:
        told = "; ".join(f"{name} {rate} ({ms} ms)" for name, rate, ms in table.rows)
        yield f"Tokens a second, {table.how}: {told}."
    if table.peak:
        yield table.peak


def _peak(rates: Rates) -> str:
    if rates.bf16_peak_tokens_per_s:
        at_fp8 = rates.fp8_peak_tokens_per_s
        more = f", {_round(at_fp8)} at the FP8 peak" if at_fp8 else ""
        return (
            f"No step of this model exceeds {_round(rates.bf16_peak_tokens_per_s)} tokens/s at the dense "
            f"BF16 peak of {rates.gpu}{more}: its GEMMs alone, all else for nothing."
        )
    return ""


def _round(value: float) -> str:
    """Write four digits: no more is known."""
    whole = f"{float(f'{value:.4g}'):,.0f}"
    return whole if value >= 1 else f"{value:.2g}"
