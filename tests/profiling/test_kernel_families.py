"""Names of kernels -> families. Where the names are from stands above them.

Arguments of templates and tiles that the source does not give are cut (``...``) or filled in.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "operator",
    [
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
    ],
)
@pytest.mark.parametrize(("name", "launcher"), EAGER_CAST)
def test_eager_cast_is_told_by_what_it_was_launched_in(operator: str, name: str, launcher: str) -> None:
    assert work_inside(operator) == "cast"
    assert classify(name, launcher, inside="cast") == "cast"
    assert classify(name, launcher) == ("copy" if name.startswith("Mem") else "pointwise")


def test_eager_cast_is_told_by_the_type_of_its_tensors() -> None:
    assert classify(COPY, "aten::copy_", ("c10::Float8_e4m3fn", "float", "Scalar")) == "cast"
    assert classify(COPY, "aten::copy_", ("c10::BFloat16", "float", "Scalar")) == "pointwise"


@pytest.mark.parametrize(
    "operator",
    [
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
        "torchao::blockwise_scaled_mm",
    ],
)
def test_fp8_operator_is_an_fp8_gemm_whatever_the_kernel_but_its_casts_and_fills(operator: str) -> None:
    assert classify("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", operator) == "gemm_fp8"
    assert classify("a_kernel_of_a_library_to_come", operator) == "gemm_fp8"
    assert classify("", operator) == "gemm_fp8"
    assert (
        classify(
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", operator
        )
        == "cast"
    )
    assert classify("Memset (Device)", operator) == "cast"
    assert work_inside(operator) == "gemm_fp8"
    assert classify(COPY, "aten::copy_", inside="gemm_fp8") == "cast"
    assert (
        classify("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "aten::mm", ("float", "float"), "gemm_fp8")
        == "gemm_fp8"
    )


@pytest.mark.parametrize(
    ("operator", "types", "family"),
    [
        ("aten::mm", ("float", "float"), "gemm_fp32"),
        ("aten::addmm", ("c10::BFloat16", "float", "float", "Scalar"), "gemm_fp32"),
        ("aten::addmm", ("float", "c10::BFloat16", "c10::BFloat16", "Scalar"), "gemm_16bit"),
        (
            "aten::addmm",
            ("float", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar", "float"),
            "gemm_16bit",
        ),
        ("aten::mm", ("c10::BFloat16", "c10::BFloat16", "float"), "gemm_16bit"),
        ("aten::bmm", ("c10::Half", "c10::Half"), "gemm_16bit"),
        ("aten::linear", ("c10::BFloat16", "c10::BFloat16", ""), "gemm_16bit"),
        ("aten::convolution", ("float", "float", "", "ScalarList"), "gemm_fp32"),
        ("aten::_int_mm", ("signed char", "signed char"), "unknown"),
    ],
)
def test_gemm_is_told_by_the_types_of_its_matrices(
    operator: str, types: tuple[str, ...], family: Family
) -> None:
    assert classify("", operator, types) == family
    assert classify("gemm_of_no_known_type", operator, types) == family


@pytest.mark.parametrize("name", ["_grouped_gemm_dX_kernel", "_grouped_wgrad_kernel"])
def test_grouped_gemm_of_unsloths_is_told_by_the_types_of_its_matrices(name: str) -> None:
    assert classify(name, "unsloth::grouped", ("c10::BFloat16", "c10::BFloat16", "int")) == "gemm_16bit"


@pytest.mark.parametrize(
    "name",
    ["", "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x64x8_stage3", "nvjet_sm90_tst_64x64_4x4_bz_TNN"],
)
def test_gemm_inside_torchs_attention_is_attention(name: str) -> None:
    """The math backend of scaled_dot_product_attention computes in fp32 whatever it is given."""
    assert (
        classify(
            name,
            "aten::bmm",
            ("float", "float"),
            inside=work_inside("aten::_scaled_dot_product_attention_math"),
        )
        == "attention"
    )
    assert classify(FP8_GEMM, "aten::_scaled_mm", inside="attention") == "gemm_fp8"


@pytest.mark.parametrize(
    ("operator", "around", "family"),
    [
        ("aten::mul_", "Optimizer.step#AdamW.step", "optimizer"),
        ("aten::pow", "aten::rms_norm", "norm"),
        ("aten::mul", "aten::_scaled_dot_product_attention_math", "attention"),
        ("aten::sub", "aten::cross_entropy_loss", "loss"),
        ("aten::mul", "autograd::engine::evaluate_function: MulBackward0", "pointwise"),
        ("aten::mul", "aten::linear", "pointwise"),
    ],
)
def test_pointwise_kernel_serves_the_operator_around_it(operator: str, around: str, family: Family) -> None:
    assert classify(SCALE, operator, inside=work_inside(around)) == family
    assert classify("", operator, inside=work_inside(around)) == family


@pytest.mark.parametrize(
    ("operator", "family"),
    [
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_add_", "optimizer"),
        ("aten::native_layer_norm_backward", "norm"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("ChunkedLogProbFunctionBackward", "loss"),
        ("unsloth_zoo::fused_linear_scale_rows", "loss"),
        ("GeneratedBackwardFor_unsloth_zoo_fused_linear_ce_v2_default", "loss"),
        ("aten::_softmax", "attention"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::embedding", "pointwise"),
        ("aten::index_put_", "pointwise"),
        ("c10d::allreduce_", "communication"),
        ("mylib::fancy", "unknown"),
        ("aten::operator_to_come", "unknown"),
    ],
)
def test_operator_alone(operator: str, family: Family) -> None:
    assert classify("", operator) == family
    assert classify("a_kernel_of_a_library_to_come", operator) == family


def test_kernels_and_operators_that_prove_fp8_are_the_same_ones() -> None:
    assert evidence.FP8_GEMM_KERNEL is FP8_GEMM_KERNEL
    assert all(
        FP8_GEMM_KERNEL.search(name)
        for name, family in ALL
        if family == "gemm_fp8" and not name.startswith("triton_tem")
    )
    assert not any(FP8_GEMM_KERNEL.search(name) for name, family in ALL if family != "gemm_fp8")
