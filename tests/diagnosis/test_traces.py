"""What a trace says of FP8 and of a GPU that waits."""

import pytest
from msgspec.structs import replace

from fp8doctor.diagnosis.traces import what_comes_first
from fp8doctor.facts.trial import TracedStep
from tests.render.test_pages import BF16, FP8, HOST_BOUND, kernel, step


def codes(found: TracedStep) -> list[str]:
    return [each.code for each in what_comes_first(found)]


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
