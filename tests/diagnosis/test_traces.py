"""What a trace says of FP8 and of a GPU that waits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.traces import (
    conclude,
    digits,
    unlike,
    what_comes_first,
    why_it_waits,
)
from fp8doctor.facts.traced import TracedStep
from tests.render.test_pages import BF16, FP8, HOST_BOUND, kernel, step


def codes(found: TracedStep) -> list[str]:
    return [code for code, _ in what_comes_first(found)]


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        ({"in_time": 2.0}, ""),
        ({"late_launch": 40.0}, "because the host launched too late"),
        ({"data_loader": 40.0, "late_launch": 20.0}, "67% of that because the data loader"),
        ({"unknown": 40.0}, "of that of launches that the trace does not tell"),
    ],
)
def test_a_gpu_that_waits_says_for_what(idle: dict[str, float], words: str) -> None:
    found = why_it_waits(step("a", idle, kernel("gemm_fp8", "nvjet", 2, 60.0)))
    assert words in found
    assert bool(found) is bool(words)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (FP8, ["CMP001"]),
        (BF16, []),
        (HOST_BOUND, ["", "STP001", "STP004"]),
        (replace(FP8, kernels=tuple(replace(each, operator=None) for each in FP8.kernels)), []),
        (step("a", {"host_copy": 5.0}, kernel("gemm_fp8", "nvjet", 2, 20.0)), [""]),
        (step("a", {}, kernel("copy", "Memcpy HtoD (Pinned -> Device)", 2, 20.0)), [""]),
        (step("a", {}, kernel("copy", "Memcpy DtoD (Device -> Device)", 2, 20.0)), []),
        (step("a", {"synchronization": 5.0}, kernel("gemm_fp8", "nvjet", 2, 20.0)), ["STP001"]),
    ],
)
def test_what_to_look_at(found: TracedStep, expected: list[str]) -> None:
    assert codes(found) == expected


def test_parts_of_the_difference_add_up_to_it() -> None:
    found = conclude((BF16, FP8)).difference
    assert found is not None
    assert sum(found.parts_ms.values()) == pytest.approx(FP8.step_ms - BF16.step_ms)
    assert found.fused_ms == 0.0


def test_norms_inside_compiled_casts_are_not_counted_as_casts() -> None:
    bf16 = step("a", {}, kernel("gemm_16bit", "nvjet", 2, 60.0), kernel("norm", "rms_norm", 2, 10.0))
    fused = kernel("cast", "triton_red_fused__scaled_mm_abs_max_0", 2, 14.0)
    found = conclude((bf16, step("b", {}, kernel("gemm_fp8", "nvjet", 2, 30.0), fused)))
    assert found.difference is not None
    assert found.difference.parts_ms["casts"] == pytest.approx(4.0)


def test_a_whole_trace_is_not_subtracted_from_a_step() -> None:
    found = conclude((BF16, HOST_BOUND))
    assert found.difference is None
    assert found.difference_summary == ""


def test_the_same_trace_twice_differs_in_nothing() -> None:
    conclude((FP8, FP8))
    assert list(unlike(FP8, FP8)) == []


@pytest.mark.parametrize(("ms", "places"), [(371.0, 1), (10.0, 1), (9.9, 2), (0.99, 3)])
def test_short_steps_have_more_decimals(ms: float, places: int) -> None:
    assert digits(ms) == places
