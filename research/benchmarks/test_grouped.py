"""Experts beside the times of an H200."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fp8doctor.cost.layer import mxfp8_experts
from fp8doctor.gpus import gpu_spec
from research.benchmarks import grouped
from tests.checks.shapes.test_gemms_too_small import experts

PAGE = Path(grouped.__file__).parent / "results" / "grouped_h200.md"

MEASURED = [each for each in grouped.experts() if each.split == "equal"]


def test_experts_take_about_what_was_measured() -> None:
    assert len(MEASURED) == 36
    assert median(abs(each.error) for each in MEASURED) < 0.08
    for each in MEASURED:
        assert abs(each.error) < (0.14 if each.what.endswith("bf16") else 0.25), each


def test_fp8_is_faster_and_slower_where_it_was() -> None:
    """All but one of 24, which takes 0.98x the speed of BF16."""
    wrong = [
        each
        for each in MEASURED
        for bf16 in [
            next(other for other in MEASURED if (other.shape, other.what) == (each.shape, each.bf16))
        ]
        if (bf16.busy_ms > each.busy_ms) != (bf16.modelled_ms > each.modelled_ms)
    ]
    assert [(each.shape, each.what) for each in wrong] == [
        ("qwen3-30b gate_up, ep 8", "te.GroupedLinear current")
    ]


def test_the_page_of_the_measurement_is_of_this_model(capsys: pytest.CaptureFixture[str]) -> None:
    grouped.main()
    assert PAGE.read_text("utf-8").endswith(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("shape", "published_ms"), [((128_000, 5120, 8192, 2), 39.4876), ((128_000, 5120, 1536, 4), 6.4552)]
)
def test_grouped_gemms_in_bf16_take_about_what_was_published(shape: Any, published_ms: float) -> None:
    facts = experts(*shape)
    cost = mxfp8_experts(facts.network.linears[0], facts, gpu_spec("B200"))
    assert cost.bf16_ms == pytest.approx(published_ms, rel=0.17)
