"""What ``-v`` says of tokens a second: of every variant, and the most that the GPU's peak allows."""

from __future__ import annotations

from collections.abc import Iterator

from fp8doctor.analysis.rates import Rate, Rates
from fp8doctor.render.timing import label

NAMES = {"as_is_compiled": "FP8, compiled"}
"""Variants that are modelled and are no arm."""


def rates_in_words(rates: Rates, fp8: bool) -> Iterator[str]:
    """Write the sentences; ``fp8`` says whether the model as it is has FP8 layers."""
    if rates.variants:
        how = f"modelled on {rates.gpu}" if rates.variants[0].basis == "modelled" else "measured"
        told = "; ".join(_rate(each, fp8) for each in rates.variants)
        yield f"Tokens a second, {how}: {told}."
    if rates.bf16_peak_tokens_per_s:
        at_fp8 = rates.fp8_peak_tokens_per_s
        more = f", {_round(at_fp8)} at the FP8 peak" if at_fp8 else ""
        yield (
            f"No step of this model exceeds {_round(rates.bf16_peak_tokens_per_s)} tokens/s at the dense "
            f"BF16 peak of {rates.gpu}{more}: its GEMMs alone, all else for nothing."
        )


def _rate(rate: Rate, fp8: bool) -> str:
    name = NAMES.get(rate.name) or label(rate.name, fp8)
    return f"{name} {_round(rate.tokens_per_s)} ({rate.step_ms:,.1f} ms)"


def _round(value: float) -> str:
    """Write four digits: no more is known."""
    whole = f"{float(f'{value:.4g}'):,.0f}"
    return whole if value >= 1 else f"{value:.2g}"
