"""Names of kernels -> families. Where the names are from stands above them.

Arguments of templates and tiles that the source does not give are cut (``...``) or filled in.
"""

import csv
from pathlib import Path
from typing import get_args

import pytest

from fp8doctor.facts import Family
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, classify, work_inside
from fp8doctor.trial.measure import evidence

HERE = Path(__file__).parent


def named(file: str) -> list[tuple[str, Family]]:
    """Names of kernels and their families, each with the GPU and the source; the longest are cut."""
    with (HERE / file).open(encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))
    families = {name: name for name in get_args(Family)}
    return [(row["name"], families[row["family"]]) for row in rows if row["gpu"] and row["source"]]


ALL = named("kernels.tsv") + named("kernels_of_other_gpus.tsv")

ABS = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::AbsFunctor<c10::BFloat16>, "
    "std::array<char*, 2ul> >"
)
AMAX = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, "
    "at::native::func_wrapper_t<..., at::native::MaxNanFunctor<...>>>>"
)
CLAMP = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous "
    "namespace)::launch_clamp_scalar(...)>"
)
SCALE = (
    "void at::native::elementwise_kernel<128, 2, "
    "at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<float, float, float, ...>>>"
)
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>"
FP8_GEMM = "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT"
EAGER_CAST = (
    (ABS, "aten::abs"),
    (AMAX, "aten::max"),
    (CLAMP, "aten::clamp"),
    (SCALE, "aten::mul"),
    (COPY, "aten::copy_"),
    ("Memset (Device)", "aten::max"),
)


@pytest.mark.parametrize(("name", "family"), ALL, ids=[name[:60] for name, _ in ALL])
def test_name_alone(name: str, family: Family) -> None:
    assert classify(name) == family


FP8_WORK = (
    # torchao 0.18: autograd functions of float8_linear.py, float8_training_tensor.py and prototype/.
    "matmul_with_hp_or_float8_args",
    "autograd::engine::evaluate_function: matmul_with_hp_or_float8_argsBackward",
    "_ToFloat8ConstrFunc",
    "NoopFwToFloat8BwDynamicBackward",
    "fp8_blockwise_mm",
    "_Float8GroupedMM",
    "mx_mm",
    "torchao::triton_fp8_blockwise_act_quant_lhs",
    "torchao::mxfp8_quantize_2d_1x32_cutedsl",
)
FP8_OPERATORS = (
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "aten::_scaled_grouped_mm_v2",
    "torchao::blockwise_scaled_mm",
)


def test_eager_cast_is_told_by_what_it_was_launched_in() -> None:
    assert {work_inside(operator) for operator in FP8_WORK} == {"cast"}
    for name, launcher in EAGER_CAST:
        assert classify(name, launcher, inside="cast") == "cast"
        assert classify(name, launcher) == ("copy" if name.startswith("Mem") else "pointwise")


@pytest.mark.parametrize("operator", FP8_OPERATORS)
def test_fp8_operator_is_an_fp8_gemm_whatever_the_kernel_but_its_casts_and_fills(operator: str) -> None:
    assert work_inside(operator) == "gemm_fp8"
    for name in (BF16_GEMM, NEW, ""):
        assert classify(name, operator) == "gemm_fp8"
    for name in (FILL, "Memset (Device)"):
        assert classify(name, operator) == "cast"


BF16, FP32 = "c10::BFloat16", "float"
BF16_GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
FP32_GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>"
NEW = "a_kernel_of_a_library_to_come"
MATH = "aten::_scaled_dot_product_attention_math"
"""It computes in fp32 whatever it is given."""


@pytest.mark.parametrize(
    ("name", "operator", "types", "around", "family"),
    [
        (COPY, "aten::copy_", ("c10::Float8_e4m3fn", FP32, "Scalar"), "", "cast"),
        (COPY, "aten::copy_", (BF16, FP32, "Scalar"), "", "pointwise"),
        (COPY, "aten::copy_", (), "aten::_scaled_mm", "cast"),
        (FP32_GEMM, "aten::mm", (FP32, FP32), "aten::_scaled_mm", "gemm_fp8"),
        # Matmuls, by the types of their matrices.
        ("", "aten::mm", (FP32, FP32), "", "gemm_fp32"),
        ("", "aten::addmm", (BF16, FP32, FP32, "Scalar"), "", "gemm_fp32"),
        ("", "aten::addmm", (FP32, BF16, BF16, "Scalar", "Scalar", FP32), "", "gemm_16bit"),
        ("", "aten::mm", (BF16, BF16, FP32), "", "gemm_16bit"),
        ("", "aten::bmm", ("c10::Half", "c10::Half"), "", "gemm_16bit"),
        ("", "aten::convolution", (FP32, FP32, "", "ScalarList"), "", "gemm_fp32"),
        ("", "aten::_int_mm", ("signed char", "signed char"), "", "unknown"),
        ("gemm_of_no_known_type", "aten::mm", (FP32, FP32), "", "gemm_fp32"),
        ("_grouped_gemm_dX_kernel", "unsloth::grouped", (BF16, BF16, "int"), "", "gemm_16bit"),
        # Inside torch's attention.
        ("", "aten::bmm", (FP32, FP32), MATH, "attention"),
        (FP32_GEMM, "aten::bmm", (FP32, FP32), MATH, "attention"),
        (FP8_GEMM, "aten::_scaled_mm", (), MATH, "gemm_fp8"),
        # Pointwise kernels serve the operator around them.
        (SCALE, "aten::mul_", (), "Optimizer.step#AdamW.step", "optimizer"),
        (SCALE, "aten::pow", (), "aten::rms_norm", "norm"),
        (SCALE, "aten::mul", (), MATH, "attention"),
        (SCALE, "aten::sub", (), "aten::cross_entropy_loss", "loss"),
        (SCALE, "aten::mul", (), "autograd::engine::evaluate_function: MulBackward0", "pointwise"),
        ("", "aten::mul", (), "aten::linear", "pointwise"),
        # An operator alone.
        (NEW, "aten::_fused_adamw_", (), "", "optimizer"),
        (NEW, "aten::_foreach_add_", (), "", "optimizer"),
        (NEW, "aten::native_layer_norm_backward", (), "", "norm"),
        (NEW, "aten::_log_softmax_backward_data", (), "", "loss"),
        (NEW, "ChunkedLogProbFunctionBackward", (), "", "loss"),
        (NEW, "unsloth_zoo::fused_linear_scale_rows", (), "", "loss"),
        (NEW, "GeneratedBackwardFor_unsloth_zoo_fused_linear_ce_v2_default", (), "", "loss"),
        (NEW, "aten::_softmax", (), "", "attention"),
        (NEW, "aten::_flash_attention_forward", (), "", "attention"),
        ("", "aten::embedding", (), "", "pointwise"),
        (NEW, "c10d::allreduce_", (), "", "communication"),
        (NEW, "mylib::fancy", (), "", "unknown"),
    ],
)
def test_a_kernel_is_told_by_its_operator_types_and_surroundings(
    name: str, operator: str, types: tuple[str, ...], around: str, family: Family
) -> None:
    assert classify(name, operator, types, inside=work_inside(around)) == family


def test_kernels_and_operators_that_prove_fp8_are_the_same_ones() -> None:
    assert evidence.FP8_GEMM_KERNEL is FP8_GEMM_KERNEL
    assert all(
        FP8_GEMM_KERNEL.search(name)
        for name, family in ALL
        if family == "gemm_fp8" and not name.startswith("triton_tem")
    )
    assert not any(FP8_GEMM_KERNEL.search(name) for name, family in ALL if family != "gemm_fp8")
