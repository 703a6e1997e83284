"""The most that FP8 can give, from breakdowns composed in the proportions of measured ones."""

from __future__ import annotations

import msgspec
import pytest

from fp8doctor.analysis.outcome import ceiling
from fp8doctor.facts import Facts, Gpu, LayerShape
from tests.checks.arms import timed
from tests.checks.step.profiled import BF16, COMPILED, FP8_COMPILED, FP8_EAGER, replaced, unprofiled
from tests.facts_of import DECODER_468M

ON_H200 = msgspec.structs.replace(
    DECODER_468M, gpus=(Gpu(name="NVIDIA H200", compute_capability="9.0", visible=True),)
)
NOT_PROFILED = (unprofiled("as_is", 366.1), unprofiled("prescribed", 88.3, **COMPILED))


def shape(bf16_ms: float, fp8_ms: float | None, layers: int = 24) -> LayerShape:
    names = tuple(f"blocks.{i}.up" for i in range(layers))
    return LayerShape(
        m=16384,
        k=1024,
        n=4096,
        recipe="tensorwise",
        layers=names,
        trained=True,
        bf16_ms=bf16_ms,
        fp8_ms=fp8_ms,
        casts_ms=0.1,
        reason=None,
    )


def with_shapes(facts: Facts, *shapes: LayerShape) -> Facts:
    return msgspec.structs.replace(facts, trial=msgspec.structs.replace(facts.trial, shapes=shapes))


def test_the_gemms_of_the_fastest_fp8_step_bound_it() -> None:
    found = ceiling(timed(ON_H200, BF16, FP8_EAGER, FP8_COMPILED))
    assert found is not None
    assert found.basis == "measured"
    assert found.speedup == pytest.approx(92.7 / (92.7 - 62.4 + 36.3))


def test_without_fp8_gemms_it_is_modelled_and_says_so() -> None:
    facts = timed(ON_H200, BF16, *NOT_PROFILED)
    found = ceiling(facts)
    assert found is not None
    assert found.basis == "modelled"
    assert 1.2 < found.speedup < 1.6


def test_a_step_that_was_measured_faster_is_not_denied() -> None:
    facts = timed(ON_H200, BF16, FP8_EAGER, replaced(FP8_COMPILED, families_ms={"gemm_fp8": 60.0}))
    facts = with_shapes(facts, shape(1.0, 1.0))
    found = ceiling(facts)
    assert found is not None
    assert found.speedup == pytest.approx(92.7 / 88.3)


def test_a_cpu_says_nothing_about_a_gpu() -> None:
    assert ceiling(timed(ON_H200, BF16, FP8_EAGER, device="cpu")) is None
