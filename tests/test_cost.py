"""The cost model against arithmetic done by hand and rows measured on a GPU."""

from __future__ import annotations

import pytest

from fp8doctor.cost import GPUS, amdahl, casts_ms, eager_cast_saving, gemm_ms, gpu_spec, modelled_gpu, step_gemms_ms
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Gpu, Linear, Workload

DECODER_468M = [(1024, 1024, 96), (1024, 4096, 48), (4096, 1024, 24)]
DECODER_8B_WIDE = [(4096, 4096, 16), (4096, 14336, 8), (14336, 4096, 4)]
"""(K, N, layers) of the two decoders that were measured on one H200, torch 2.11, torchao 0.18, November 2026."""


@pytest.mark.parametrize(("share", "speedup", "whole"), [(0.6, 1.5, 1.25), (0.8, 1.5, 1.364), (0.0, 9.0, 1.0), (1.0, 2.0, 2.0), (0.5, 0.5, 0.667)])
def test_amdahl(share: float, speedup: float, whole: float) -> None:
    assert amdahl(share, speedup) == pytest.approx(whole, abs=0.001)


@pytest.mark.parametrize(("share", "speedup"), [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.0), (0.5, -1.0)])
def test_amdahl_refuses_what_is_not_a_share_or_a_speedup(share: float, speedup: float) -> None:
    with pytest.raises(ValueError, match="share of 0 to 1"):
        amdahl(share, speedup)


def test_a_large_gemm_takes_the_time_that_was_measured() -> None:
    h200 = gpu_spec("H200")
    assert gemm_ms(16384, 4096, 16384, h200, fp8=False) == pytest.approx(2.78, rel=0.02)
    assert gemm_ms(16384, 4096, 16384, h200, fp8=True) == pytest.approx(1.47, rel=0.02)


def test_a_narrow_gemm_is_bound_by_memory_and_gains_less_than_two() -> None:
    h200 = gpu_spec("H200")
    bf16, fp8 = gemm_ms(8192, 4096, 16, h200, fp8=False), gemm_ms(8192, 4096, 16, h200, fp8=True)
    assert bf16 == pytest.approx(2 * (8192 * 4096 + 4096 * 16 + 8192 * 16) / (4.8 * 0.9 * 1e9))
    assert fp8 is not None
    assert 1.5 < bf16 / fp8 < 2.0


def test_a_tiny_gemm_takes_a_launch() -> None:
    assert gemm_ms(16, 16, 16, gpu_spec("H200"), fp8=True) == 0.002


def test_a_frozen_weight_has_two_gemms_of_three() -> None:
    h200 = gpu_spec("H200")
    trained, frozen = (step_gemms_ms(8192, 4096, 4096, h200, fp8=True, weight_gradient=w) for w in (True, False))
    assert trained is not None
    assert frozen == pytest.approx(trained * 2 / 3)


def test_there_is_no_fp8_gemm_below_compute_capability_8_9() -> None:
    a100 = gpu_spec("a100")
    assert gemm_ms(8192, 4096, 4096, a100, fp8=True) is None
    assert step_gemms_ms(8192, 4096, 4096, a100, fp8=True) is None
    assert gemm_ms(8192, 4096, 4096, a100, fp8=False) == pytest.approx(2 * 8192 * 4096 * 4096 / (312 * 0.8 * 1e9))


@pytest.mark.parametrize(("layers", "tokens", "measured_ms"), [(DECODER_468M, 16384, 273.6), (DECODER_8B_WIDE, 8192, 117.1)])
def test_eager_casts_are_within_ten_percent_of_the_rows_they_were_fitted_to(layers: list[tuple[int, int, int]], tokens: int, measured_ms: float) -> None:
    modelled = sum(casts_ms(tokens, k, n, gpu_spec("H200"), compiled=False) * count for k, n, count in layers)
    assert modelled == pytest.approx(measured_ms, rel=0.10)


@pytest.mark.parametrize(
    ("layers", "tokens", "eager_ms", "compiled_ms"),
    [(DECODER_468M, 16384, 366.13, 88.31), (DECODER_8B_WIDE, 8192, 179.29, 71.55)],
)
def test_the_saving_of_compiling_covers_what_was_measured(layers: list[tuple[int, int, int]], tokens: int, eager_ms: float, compiled_ms: float) -> None:
    linears = [Linear(in_features=k, out_features=n, gemms=count) for k, n, count in layers]
    saving = eager_cast_saving(Facts(workload=Workload(tokens=tokens), assumed_gpu="h200"), linears)
    assert saving is not None
    assert saving.low < eager_ms - compiled_ms < saving.high
    assert (saving.basis, saving.gpu) == ("modelled", "H200")


def test_with_few_tokens_the_host_sets_the_saving() -> None:
    linears = [Linear(in_features=2048, out_features=2048, gemms=55)]
    saving = eager_cast_saving(Facts(workload=Workload(tokens=256), assumed_gpu="H200"), linears)
    assert saving is not None
    assert saving.middle == pytest.approx(113.5 - 22.7, rel=0.05)


def test_accumulation_multiplies_the_casts() -> None:
    linears = [Linear(in_features=1024, out_features=1024)]
    one, four = (eager_cast_saving(Facts(workload=Workload(tokens=16384, accumulate=n)), linears) for n in (1, 4))
    assert one
    assert four
    assert four.middle == pytest.approx(4 * one.middle)


def test_without_tokens_or_fp8_tensor_cores_no_saving_is_claimed() -> None:
    linears = [Linear(in_features=1024, out_features=1024)]
    assert eager_cast_saving(Facts(), linears) is None
    assert eager_cast_saving(Facts(workload=Workload(tokens=None)), linears) is None
    assert eager_cast_saving(Facts(workload=Workload(tokens=16384), assumed_gpu="A100"), linears) is None


@pytest.mark.parametrize("name", ["a100", "L40S", "rtx4090", "RTX 4090", "h100", "H200", "b200", "Rtx5090"])
def test_every_gpu_of_the_contract_is_known_in_any_case(name: str) -> None:
    spec = gpu_spec(name)
    assert spec.source
    assert spec.name == name.upper().replace(" ", "")


def test_an_unknown_gpu_is_named_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"'H300'; known are A100, .*RTX5090"):
        gpu_spec("H300")


def test_the_modelled_gpu_is_the_assumed_then_the_visible_then_h100() -> None:
    a100, h200 = Gpu(name="NVIDIA A100-SXM4-80GB", visible=False), Gpu(name="NVIDIA H200", visible=True)
    assert modelled_gpu(Facts()).name == "H100"
    assert modelled_gpu(Facts(gpus=())).name == "H100"
    assert modelled_gpu(Facts(gpus=(a100, h200))).name == "H200"
    assert modelled_gpu(Facts(gpus=(h200,), assumed_gpu="l40s")).name == "L40S"
    assert modelled_gpu(Facts(gpus=(Gpu(name="NVIDIA GeForce RTX 4090", visible=True),))).name == "RTX4090"


def test_peaks_are_dense_and_fp8_doubles_them_where_it_exists() -> None:
    for spec in GPUS:
        if spec.fp8_tflops is None:
            assert float(spec.compute_capability) < 8.9
        else:
            assert 1.9 < spec.fp8_tflops / spec.bf16_tflops < 2.1
