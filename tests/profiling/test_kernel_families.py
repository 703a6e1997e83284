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

SEEN_ON_AN_H200: dict[Family, tuple[str, ...]] = {
    # torch 2.11.0+cu130, torchao 0.18.0, Transformer Engine 2.20.2; kernels.md 1.1 to 1.3.
    "gemm_fp8": (
        "nvjet_sm90_qqtst_256x128_128x4_1x2_h_bz_coopA_TNT",
        "nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_TNN",
        "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT",
        "nvjet_sm90_qrtst_128x64_128x8_1x2_h_bz_algo2_TNT",
        "nvjet_sm90_qrtst_144x128_128x6_1x2_h_bz_coopA_algo2_TNN",
    ),
    "gemm_16bit": (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN",
        "nvjet_sm90_tst_128x128_64x6_1x2_h_bz_splitK_NTT",
    ),
    "cast": (
        "void at::native::vectorized_elementwise_kernel<4, "
        "at::native::float8_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}, ...>",
        "void at::native::elementwise_kernel<128, 4, "
        "at::native::gpu_kernel_impl_nocast<at::native::float8_copy_kernel_cuda(...)>>",
        "triton_poi_fused__scaled_mm__to_copy_clamp_clone_mul_reciprocal_silu_t_view_3",
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_silu_t_view_13",
        "triton_poi_fused__fused_rms_norm__scaled_mm__to_copy_clamp_clone_mul_reciprocal_silu_silu_backward_t_view_8",
        "triton_red_fused_abs_max_mul_silu_view_13",
        "triton_red_fused_abs_max_mul_silu_silu_backward_view_4",
        "void cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, "
        "__nv_fp8_e4m3*, float const*)",
        "void transformer_engine::(anonymous namespace)::amax_kernel<16, true, __nv_bfloat16>",
        "transformer_engine::(anonymous namespace)::compute_scale_from_amax_kernel",
        "void transformer_engine::delayed_scaling_recipe::(anonymous "
        "namespace)::amax_and_scale_update_impl::kernel_bulk",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, "
        "cutlass::bfloat16_t>>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, "
        "64, 128, 8, cutlass::bfloat16_t>>",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::FusedOptimizerTensorListMetadata<4>, ...>",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<c10::BFloat16, "
        "float, true>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, "
        "float, 32, 2, 64, true, true, true>",
        "triton_per_fused__fused_rms_norm__unsafe_view_add_4",
        "triton_red_fused__fused_rms_norm__unsafe_view_add_4",
        "triton_per_fused__fused_rms_norm__fused_rms_norm_backward_add_view_4",
    ),
    "loss": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, "
        "...LogSoftMaxForwardEpilogue>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, c10::BFloat16, float, "
        "...LogSoftMaxBackwardEpilogue>",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, "
        "...LogSoftMaxForwardEpilogue>",
    ),
    "pointwise": (
        "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, "
        "c10::BFloat16, c10::BFloat16, ...>>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>, ...>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous "
        "namespace)::silu_kernel(at::TensorIteratorBase&)>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous "
        "namespace)::silu_backward_kernel(at::TensorIteratorBase&)>",
        "void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<...>",
        "triton_poi_fused__unsafe_view_mul_silu_2",
        "triton_poi_fused__unsafe_view_mul_silu_silu_backward_view_2",
    ),
    "copy": ("Memset (Device)",),
}

PUBLIC_TRACES_AND_SOURCES: dict[Family, tuple[str, ...]] = {
    # kernels.md 2: older CUDA, Ada, Blackwell, CUTLASS, Transformer Engine's sources, NCCL.
    "gemm_fp8": (
        "nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN",
        "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT",
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "sm90_xmma_gemm_e4m3f32_e4m3f32_f32_tn_n_tilesize128x128x128",
        "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n__5x_cublas",
        "nvjet_qqtst_256x192_128x4_2x1_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
        "cutlass3x_sm90_tensorop_s64x128x32gemm_e4m3_e4m3_f32_bf16_bf16_128x128x128_2x1x1_0_tnt_align16_warpspecialized",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<..., "
        "cutlass::float_e4m3_t, ...>>>",
        "void deep_gemm::fp8_gemm_kernel<...>",
        "sm90_fp8_gemm_1d2d_impl",
        # torchao 0.18, prototype/blockwise_fp8_training/kernels.py; Unsloth 2026.10 on an H200.
        "triton_fp8_gemm_1x128_128x128_kernel",
        "blockwise_fp8_gemm_kernel",
        # torch 2.13, torch/_inductor/kernel/mm.py: its template named by the operator.
        "triton_tem_fused__scaled_mm_3",
    ),
    "gemm_16bit": (
        "nvjet_tst_192x192_64x4_1x1_h_bz_coopB_bias_TNN",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x128_32x5_tn_align8>",
        "nvjet_sm90_tss_128x128_64x6_1x2_h_bz_splitK_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
        "true, false, false>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, "
        "4, 4, false>",
    ),
    "gemm_fp32": (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
        "nvjet_sss_128x128_32x6_1x2_h_bz_TNT",
        "nvjet_sm90_sss_128x128_32x6_1x2_h_bz_TNT",
        "cutlass_80_tensorop_s1688gemm_128x128_16x5_tn_align4",
        "cutlass_80_simt_sgemm_128x128_8x5_tn_align1",
        "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16",
        "ampere_sgemm_128x64_tn",
    ),
    "cast": (
        "triton_poi_fused__scaled_mm__to_copy_clamp_mul_reciprocal_t_view_4",
        "triton_poi_fused__scaled_mm__to_copy_clamp_div_t_transpose_view_5",
        "triton_red_fused_abs_max_2",
        "triton_red_fused__to_copy_abs_clamp_max_mul_reciprocal_3",
        "void transformer_engine::(anonymous namespace)::cast_fp8_2D_kernel<...>",
        "void transformer_engine::(anonymous namespace)::cast_fp8_gated_kernel<...>",
        "void transformer_engine::unary_kernel<...>",
        "void transformer_engine::cast_transpose_fusion_kernel_optimized<...>",
        "void transformer_engine::cast_transpose_fused_kernel_notaligned<...>",
        "void transformer_engine::dgated_act_cast_transpose_kernel<...>",
        "void transformer_engine::(anonymous namespace)::multi_cast_transpose_kernel<...>",
        "transpose_optimized_kernel(...)",
        "void transformer_engine::(anonymous namespace)::transpose_general_kernel<...>",
        "void transformer_engine::(anonymous namespace)::zero_amax_kernel(float*)",
        "void transformer_engine::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<...>",
        "void transformer_engine::(anonymous namespace)::block_scaled_cast_transpose_kernel<...>",
        "fp8_block_scaling_partial_cast_kernel",
        "void transformer_engine::quantize_mxfp8_kernel<...>",
        "void transformer_engine::(anonymous namespace)::multi_tensor_swizzle_row_scaling_kernel<...>",
        # torchao 0.18, prototype/blockwise_fp8_training/kernels.py and prototype/mx_formats/kernels.py.
        "triton_fp8_blockwise_act_quant_lhs_kernel",
        "triton_fp8_blockwise_weight_quant_transposed_rhs_kernel",
        "to_mxfp8_dim1_kernel",
        # unsloth, kernels/fp8.py.
        "act_quant_kernel",
        "weight_dequant_kernel",
    ),
    "attention": (
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<...>>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, "
        "...>::Params)",
        "triton_tem_fused_flex_attention_0",
        # torch 2.13, aten/src/ATen/native/cuda/PersistentSoftmax.cuh: is_log_softmax is the fifth argument,
        # is_masked the sixth.
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, "
        "false, false>",
        "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, "
        "false, true>",
    ),
    "loss": (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>",
        "liger_cross_entropy_kernel",
        "triton_red_fused__log_softmax_nll_loss_forward_1",
    ),
    "norm": (
        "_rms_norm_forward_kernel",
        "_rms_layernorm_forward",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<...>",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
        "ncclKernel_AllReduce_RING_LL_Sum_float",
        "kuserbuffers_pushrecv",
    ),
    "copy": (
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy DtoH (Device -> Pinned)",
    ),
    "pointwise": (
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned "
        "int, 2, 2, -2, true>",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, "
        "float, long>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>",
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*, "
        "__nv_bfloat16*, int, int)",
    ),
    "unknown": (
        "",
        "my_own_kernel",
        "triton_tem_fused_mystery_0",
        "gemm_of_no_known_type",
        "Optimizer.step#AdamW.step",
    ),
}

TRANSFORMER_ENGINE: dict[Family, tuple[str, ...]] = {
    # Transformer Engine 2.20.2: the kernels in the symbols of its library (transformer_engine_cu13 on PyPI,
    # libtransformer_engine.so), those with fused_attn, reduce_dbias and cublasLt seen on an H200; cuDNN's
    # helpers: seen there, and in public traces (lean_reduction).
    "attention": (
        "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*, void const*, void*, "
        "void*, unsigned int, ...)",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, ...)",
        "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int, ...)",
        "void cudnn::fusion::lean_reduction_kernel<...>",
        "transformer_engine::fused_attn::extract_seed_and_offset(long*, bool, long*, unsigned long, "
        "long*, unsigned long, unsigned int)",
        "transformer_engine::fused_attn::cu_seqlens_to_actual_seqlens(...)",
        "void transformer_engine::flash_attention::prepare_kernel_fwd<__nv_bfloat16>(__nv_bfloat16 "
        "const*, __nv_bfloat16*, unsigned long, ...)",
        "void transformer_engine::context_parallel::thd_lse_kernel<false, "
        "transformer_engine::context_parallel::ReadLseFunctor>(float*, float*, int*, ...)",
        "transformer_engine::context_parallel::thd_partition_indices_kernel(...)",
        "void transformer_engine::kv_cache::copy_to_kv_cache_kernel<__nv_fp8_e4m3>(...)",
        "void transformer_engine::multi_tensor_transpose_to_bhsd::transpose_to_bhsd_kernel<__nv_fp8_e4m3, "
        "false>(...)",
        "void transformer_engine::scaled_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, "
        "float, 9>(...)",
    ),
    "cast": (
        "void transformer_engine::(anonymous namespace)::HadamardAmaxTmaKernel<...>",
        "transformer_engine::(anonymous namespace)::GraphSafeMultiZeroAmaxKernel(...)",
        "transformer_engine::(anonymous namespace)::MultiAmaxMemcpyD2DKernelPreRHT(...)",
        "transformer_engine::(anonymous namespace)::update_tensor_scale_inv_kernel(float const*, float*)",
        "void transformer_engine::(anonymous namespace)::unswizzle_scaling_kernel<...>",
        "transformer_engine::nvfp4_recipe::nvfp4_transpose_kernel(unsigned char const*, unsigned char*, "
        "unsigned long, unsigned long)",
        "transformer_engine::dispatch::mxfp8::quantize_kernel::zero_scales_kernel(unsigned char*, "
        "unsigned long, float const*)",
        "void transformer_engine::gated_act_kernel<8, true, float, transformer_engine::Empty, ..., "
        "__nv_bfloat16, __nv_fp8_e4m3>(...)",
        "void multi_tensor_apply_kernel<TensorListMetadata<3, false>, "
        "transformer_engine::multi_tensor_compute_scale::ComputeScaleAndScaleInvFunctor, ...>",
    ),
    "optimizer": (
        "void multi_tensor_apply_kernel<TensorListMetadata<5, true>, "
        "transformer_engine::multi_tensor_adam::AdamFunctorMaster<__nv_fp8_e5m2, float, ...>>",
        "void multi_tensor_apply_kernel<TensorListMetadata<1, false>, "
        "transformer_engine::multi_tensor_l2norm::L2NormFunctor<float>, ...>",
        "transformer_engine::multi_tensor_l2norm::cleanup(...)",
    ),
    "loss": ("void transformer_engine::fused_router::fused_moe_aux_loss_forward_kernel<...>",),
    "pointwise": (
        "void transformer_engine::detail::reduce_dbias_kernel<4, float, __nv_bfloat16>(__nv_bfloat16*, "
        "float const*, int, int)",
        "void transformer_engine::dispatch::common::kernel::group_reduce_dbias_kernel<2, float>(...)",
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(__nv_bfloat16 const*, int "
        "const*, float const*, ...)",
        "void transformer_engine::fused_qkv_rope_backward_kernel<...>",
        "void transformer_engine::gated_act_kernel<16, false, float, transformer_engine::SiTUGLUParam, "
        "..., __nv_bfloat16, __nv_bfloat16>(...)",
        "void transformer_engine::unary_grad_kernel<16, false, float, transformer_engine::Empty, ..., "
        "__nv_bfloat16, __nv_bfloat16>(...)",
        "void transformer_engine::(anonymous namespace)::multi_padding_kernel<32, __nv_bfloat16>(...)",
        "transformer_engine::multi_tensor_pad_last_dim::multi_tensor_pad_last_dim_kernel(transformer_engine::multi_tensor_pad_last_dim::MultiPadParams)",
        "void transformer_engine::fused_router::fused_topk_with_score_function_forward_kernel<__nv_bfloat16, ...>",
        "void moe_permute_kernel<__nv_bfloat16, __nv_bfloat16, 128, false>(...)",
        "void moe_unpermute_kernel<__nv_bfloat16, __nv_bfloat16, true>(...)",
        "void nv::topk::last_filter_kernel<__nv_bfloat16, int, 11, false>(...)",
        "(anonymous namespace)::setup_grouped_gemm_kernel(void**, void**, ..., float**, float**, ...)",
        "void cublasLt::epilogue::impl::globalKernelBgradAB_v2<8, 128, __nv_bfloat16, __nv_bfloat16, "
        "float>(...)",
    ),
}

UNSLOTH: dict[Family, tuple[str, ...]] = {
    # Unsloth 2026.10.9 and unsloth_zoo 2026.10.9, their Triton functions: unsloth/kernels/ (fp8.py, nvfp4.py, nf4.py,
    # nf4_gemv.py, int4_packed.py, swiglu.py, geglu.py, rope_embedding.py, qk_norm_rope.py, rms_layernorm.py,
    # layernorm.py, fused_add_rms_layernorm.py, cross_entropy_loss.py, large_head_attention.py) and unsloth_zoo/
    # (fused_losses/fused_linear.py, mxfp4_dequant.py, mxfp4_gemm.py, temporary_patches/moe_*.py, gpt_oss_*.py,
    # gdn_causal_conv1d.py). _fg_kernel, _fl_*, _rms_layernorm_* and _rope_embedding_QK: also seen on an H200.
    "gemm_fp8": ("_w8a8_block_fp8_matmul", "_w8a8_block_fp8_matmul_tma", "_w8a8_block_fp8_small_m"),
    # The weights are decoded in registers; the activations are BF16 or fp16.
    "gemm_16bit": (
        "_fp8_rowwise_gemv_kernel",
        "_fp8_rowwise_gemv_rows_kernel",
        "_fp8_rowwise_gemv_rows_reduce",
        "_fp8_block_gemv_kernel",
        "_nvfp4_matmul_fwd_kernel",
        "_nvfp4_matmul_dx_kernel",
        "_split_sum_kernel",
        "_mxfp4_grouped_mm_kernel",
        "_mxfp4_grouped_gemv_kernel",
        "_gemv_nf4_kernel",
        "_gemv_nf4_words_kernel",
        "_nf4_grouped_kernel",
        "_routed_gate_up_kernel",
        "_routed_down_kernel",
        "_routed_lora_a_kernel",
        "_routed_lora_b_kernel",
        "_routed_bf16_expert_kernel",
        "_bf16_gate_up_finalize_kernel",
        "_bf16_down_finalize_kernel",
    ),
    "cast": (
        "_e4m3fn_bytes_dequant_kernel",
        "_e4m3fn_scale_dequant_kernel",
        "_nvfp4_dequant_kernel",
        "_mxfp4_dequant_kernel",
    ),
    "attention": ("_lh_fwd", "_lh_bwd_pre", "_lh_bwd_dq", "_lh_bwd_dkdv"),
    "norm": (
        "_rms_layernorm_backward",
        "_rms_layernorm_forward_rows",
        "_rms_layernorm_backward_rows",
        "_rms_sum_dw_partials",
        "_gemma_rms_layernorm_forward",
        "_add_rms_layernorm_inference",
        "layernorm_forward",
        "layernorm_backward",
        "layernorm_backward_dw",
        "_layernorm_sum_partials",
    ),
    "loss": (
        "_cross_entropy_forward",
        "_chunked_cross_entropy_forward",
        "_cross_entropy_backward",
        "_fl_forward_kernel",
        "_fl_partial_kernel",
        "_fl_combine_kernel",
        "_fl_backward_kernel",
        "_fl_flash_p_kernel",
        "_fl_flash_u_kernel",
        "_fl_scale_kernel",
        "_fl_jsd_stats_kernel",
        "_fl_jsd_row_kernel",
        "_fl_jsd_dz_kernel",
    ),
    # NF4 and INT4 weights are decoded as bitsandbytes decodes them, which is no FP8 conversion either.
    "pointwise": (
        "_fg_kernel",
        "_DWf_DW_dfg_kernel",
        "_exact_forward_kernel",
        "_exact_backward_kernel",
        "_approx_forward_kernel",
        "_approx_backward_kernel",
        "_rope_embedding_QK",
        "_qk_norm_rope_forward",
        "_qk_norm_rope_backward",
        "_nf4_dequant_kernel",
        "_nf4_dequant_stack_kernel",
        "_nf4_select_dequant_kernel",
        "_dequant_repacked_kernel",
        "_swiglu_fwd_kernel",
        "_swiglu_bwd_kernel",
        "_swiglu_bwd_interleaved_kernel",
        "_route_single_kernel",
        "_route_hist_kernel",
        "_route_scan_kernel",
        "_route_starts_kernel",
        "_route_scatter_kernel",
        "_causal_conv1d_fwd_kernel",
        "_causal_conv1d_bwd_g_kernel",
        "_causal_conv1d_bwd_dxdw_kernel",
        "_causal_conv1d_update_kernel",
    ),
    # Their operands may be of 16 or of 32 bits, which the profiler records and the name does not say; the last
    # two are what any library may call a kernel.
    "unknown": (
        "_grouped_gemm_forward_kernel",
        "_grouped_gemm_dX_kernel",
        "_grouped_gemm_dW_kernel",
        "_grouped_gemm_dW_per_expert_kernel",
        "_grouped_gemm_kernel",
        "_grouped_wgrad_kernel",
        "_dequant_kernel",
        "_combine_fwd_kernel",
    ),
}

OTHER_GPUS = Path(__file__).with_name("kernels_of_other_gpus.tsv")
"""Names from public traces of GPUs that no recording is of, each with its source; the longest are cut."""


def of_other_gpus() -> list[tuple[str, Family]]:
    with OTHER_GPUS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    families = {name: name for name in get_args(Family)}
    return [(row["name"], families[row["family"]]) for row in rows if row["gpu"] and row["source"]]


ALL = [
    (name, family)
    for names in (SEEN_ON_AN_H200, PUBLIC_TRACES_AND_SOURCES, TRANSFORMER_ENGINE, UNSLOTH)
    for family, group in names.items()
    for name in group
] + of_other_gpus()

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
