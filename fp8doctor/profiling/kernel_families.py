"""Classify GPU kernels by the operators that launched them and by name.

Names were seen on an H200 (torch 2.11, torchao 0.18, Transformer Engine 2.20.2), or are from public traces,
sources, and symbols of Transformer Engine's library (see the tests). FP8 casts that are not compiled are
ordinary kernels: they are told by an FP8 operator or autograd function around them, or by an FP8 tensor.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Literal

from fp8doctor.facts import Family

FP8_OPERATORS = frozenset(
    {"aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"}
)

FP8_GEMM_KERNEL = re.compile(
    r"^nvjet_(sm\d+_)?[a-z]*q[a-z]*_|xmma_gemm_e[45]m[23]|cutlass.*(e4m3|e5m2)|float_e[45]m[23]|deep_gemm|f8f8bf16"
    r"|fp8_(fp4_)?gemm|gemm_fp8|[Mm]xfp8_?[Gg]emm|w8a8_block_fp8_"
    r"|^(bmm|gemm)_[A-Za-z\d]+_[A-Za-z\d]*E[45]m[23]"
    r"|kernel_cutlass_\w*[Gg]emm\w*f8E[45]M[23]"
    r"|Cijk_[A-Za-z]+_[A-Za-z]+_[FB]8"
)
"""Matmul kernels with an FP8 operand. cuBLASLt's ``nvjet`` names e4m3 ``q`` (``qqtst``, ``qrtst``; H200,
torchao 0.18, TE 2.20.2); the others are from public traces and sources. TensorRT-LLM's ``bmm_`` names the
result, then both operands; hipBLASLt's ``Cijk_`` names e4m3 ``F8`` and e5m2 ``B8``; CuTe's DSL appends tensor
types (``f8E4M3FN``). ``w8a8_block_fp8_`` is SGLang's and Unsloth 2026.10's (``unsloth/kernels/fp8.py``),
whose ``small_m`` also quantizes the activations."""

_FP8_GEMM_OPERATOR = re.compile(r"^\w+::\w*(_scaled_(grouped_)?mm|fp8_gemm|f8f8bf16|fp8_bf16)")
"""Includes torchao's own, such as ``torchao::blockwise_scaled_mm`` and
``torchao::triton_fp8_gemm_1x128_128x128``."""

_FP8_WORK = re.compile(r"float8|fp8|nvfp4|mx_mm|blockwise_(act|weight)_quant", re.IGNORECASE)
"""Operators and autograd functions of FP8. torchao 0.18: ``matmul_with_hp_or_float8_args``,
``_ToFloat8ConstrFunc``, ``_FromFloat8ConstrFunc``, ``NoopFwToFloat8BwDynamic``, ``fp8_blockwise_mm``,
``_Float8GroupedMM``, ``mx_mm``, ``torchao::triton_fp8_...``."""

_Rule = Family | Literal["gemm"]
_Rules = tuple[tuple[_Rule, str | re.Pattern[str]], ...]
_TYPED_GEMM: Literal["gemm"] = "gemm"
"""A matmul whose operand types are not decided yet."""

_DECODES_WEIGHTS = re.compile(
    r"^_(fp8_(rowwise|block)_gemv|nvfp4_matmul_|mxfp4_grouped_(mm|gemv)|gemv_nf4_|nf4_grouped_kernel|split_sum_kernel"
    r"|routed_(gate_up|down|lora_[ab]|bf16_expert)_kernel|bf16_(gate_up|down)_finalize_kernel)"
)
"""Matmuls of Unsloth 2026.10 that decode FP8 or 4-bit weights in registers and multiply in 16 or 32 bits, and
their split sums. Never FP8 matmuls, even with an FP8 argument. Sources: ``unsloth/kernels/`` (``fp8.py``,
``nvfp4.py``, ``nf4_gemv.py``), ``unsloth_zoo/mxfp4_gemm.py`` and its ``temporary_patches/``
(``moe_nf4_grouped.py``, ``moe_routed.py``)."""

_COMMUNICATION = re.compile(r"^nccl|nvshmem|userbuffers|deep_?ep::|multimem_|(one|two)_shot_all_reduce")
_COPY = re.compile(r"^Mem(cpy|set)\b")
_OWN_COPY = re.compile(r"^Mem(cpy DtoD|set)\b")
"""Copies within the GPU, part of the operator around them."""

_GENERATED = re.compile(r"^triton_(poi|red|per|mix|for|unk|split_scan|spl)_fused_")
_TEMPLATE = re.compile(r"^triton_(tem|mm|mm_persistent)_")

_GENERATED_RULES: tuple[tuple[Family, str], ...] = (
    ("cast", r"_scaled_(grouped_)?mm|float8"),
    ("loss", r"_log_softmax|nll_loss|cross_entropy"),
    ("norm", r"(layer|rms|group|batch)_norm|mean_.*rsqrt"),
    ("attention", r"_softmax|attention"),
    ("pointwise", ""),
)
"""Inductor names a kernel after the fused operators: ``_scaled_mm`` means a kernel next to a matmul."""

_GENERATED_CAST = re.compile(
    r"amax|abs_.*max|_to_copy.*clamp.*(reciprocal|div|mul)|clamp.*_to_copy.*(reciprocal|div|mul)"
)
"""Casts that do not name FP8; without FP8 matmuls in the step they are the user's arithmetic."""

_NAME_RULES: _Rules = (
    (
        "attention",
        r"transformer_engine::(fused_attn|flash_attention|context_parallel|kv_cache|multi_tensor_transpose_to_bhsd)::"
        r"|cudnn::fusion::(compute_dot|convert_d[qkv]|fmha|lean_reduc)",
    ),
    ("optimizer", r"multi_tensor_(adam|sgd|l2norm)::"),
    (
        "cast",
        r"multi_tensor_compute_scale::|transformer_engine.*(AmaxKernel|AmaxMemcpy|AmaxTma|Hadamard|scale_inv_kernel|zero_scales_kernel|nvfp4_)",
    ),
    (
        "pointwise",
        r"setup_grouped_gemm|grouped_bias_add|compute_grouped_tensor_offsets|convert_int32_to_int64|multi_tensor_pad_last_dim::",
    ),
    (
        "loss",
        r"LogSoftMax|softmax_warp_\w+<[^,<>]*,[^,<>]*,[^,<>]*, ?\d+, true|nll_loss|cross_entropy"
        r"|[Ll]oss_?([Ff]or|[Bb]ack)ward"
        r"|^_fl_(forward|backward|partial|combine|flash_[pu]|scale|jsd_\w+)_kernel",
    ),
    (
        "attention",
        r"(?i)flash_(fwd|bwd)|flash::|FlashAttn|fmha|cudnn.*sdpa|attn_(fwd|bwd)|attention|BatchPrefill|softmax"
        r"|^sage_(fwd|quant)|^reduce_segments|^_lh_(fwd|bwd)",
    ),
    ("gemm_fp8", FP8_GEMM_KERNEL),
    ("gemm_16bit", _DECODES_WEIGHTS),
    (
        "cast",
        r"float8_copy|cast_transpose|cast_fp8|quantize_(mxfp8|transpose|blockwise|fp8)|block_scaled_(1d_)?cast|fp8_block_scaling"
        r"|(^|[^a-z])(zero_)?amax_kernel|compute_scale_from_amax|amax_and_scale_update|\btranspose_(optimized|general)_kernel"
        r"|swizzle_(\w+_)?scaling|per_token_group_quant|scaled_fp8_quant|to_(float8|mxfp8|nvfp4)|(mxfp[48]|fp8|nvfp4|e4m3fn)_\w*quant|mx_block_rearrange"
        r"|quantize_with_block_size|FP8_quantize|FP8rowwise|FP8_qparam|kernel_cutlass_\w*f8E[45]M[23]"
        r"|transformer_engine.*\b(unary_kernel|dequant)|^(act_quant|weight_dequant)_kernel|[Ff]loat8|__nv_fp8",
    ),
    (
        _TYPED_GEMM,
        r"(?i)^nvjet_|(?<!fb)gemm(?!a\d*_)|gemv|grouped_wgrad|splitKreduce|^cutlass_|cutlass\w*::Kernel|xmma_(fprop|dgrad|wgrad)|convolve|\bdot_kernel"
        r"|^bmm_|Cijk_|scudnn|matmul_ogs",
    ),
    (
        "optimizer",
        r"(?i)multi_tensor|FusedOptimizer|FusedAdam|foreach|adamw?_\w*kernel|kOptimizer|kPreconditionOptimizer",
    ),
    (
        "norm",
        r"(?i)(layer|rms|batch|group)_?norm|rms_layernorm|^_rms_sum_dw|GammaBeta|\bln_(fwd|bwd)|RowwiseMoments|cuComputeGradInput|\bbn_(fw|bw)",
    ),
    (
        "pointwise",
        r"(?i)elementwise|vectorized_|unrolled_|reduce_kernel|CatArrayBatched|copy_kernel|fill|index"
        r"|embedding|at::native|dropout|silu|gelu|swiglu|geglu"
        r"|rope|rotary|gather|scatter|^void (at_cuda_detail::)?cub::|\bthrust::|RadixSort"
        r"|nchwToNhwc|nhwcToNchw|kDequantizeBlockwise|kQuantizeBlockwise"
        r"|^(void )?transformer_engine::|moe_(un)?permute|nv::topk::|epilogue::impl::globalKernel"
        r"|moe::dev::|_topk_forward|_combined_routing|_sum_bitmatrix|store_kvcache|reshape_and_cache"
        r"|^_(fg|DWf_DW_dfg|(exact|approx)_(for|back)ward|route_(single|hist|scan|starts))_kernel|^_nf4_\w*dequant"
        r"|^_dequant_repacked_kernel|causal_conv1d_(fwd|bwd|update)"
        r"|fbgemm_gpu::|bounds_check_indices|permute_pooled_embs|recat_copy|batched_transpose|SubTensorOp",
    ),
)
"""First match wins."""

_OPERATOR_RULES: _Rules = (
    ("communication", r"^(c10d|_c10d_functional|nccl|symm_mem)::|^record_param_comms|^nccl:"),
    ("optimizer", r"^aten::(_fused_(adam|adamw|sgd|adagrad)|_foreach_|_amp_)|^Optimizer\."),
    (
        "loss",
        r"^aten::.*(log_softmax|nll_loss|cross_entropy|kl_div|(mse|l1|huber|margin|embedding)_loss)|^\w*LogProb"
        r"|^(GeneratedBackwardFor_)?unsloth_zoo(::|_)fused_linear_",
    ),
    (
        "attention",
        r"scaled_dot_product|flash_attn|attention|^FusedAttnFunc|^AttnFuncWith|^aten::_(safe_)?softmax",
    ),
    ("norm", r"^aten::.*(layer|rms|batch|group|instance)_norm"),
    (
        _TYPED_GEMM,
        r"^aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|_grouped_mm|_addmm_activation|linear(_backward)?|matmul|.*convolution\w*)$|^mkldnn::",
    ),
    (
        "pointwise",
        r"^aten::_?(abs|add|addcdiv|addcmul|amax|amin|aminmax|any|all|arange|argmax|argmin|argsort|bernoulli|bincount|bitwise_\w+|cat|ceil|clamp\w*"
        r"|clone|constant_pad_nd|contiguous|copy|cos|cumprod|cumsum|div|dropout|elu\w*|embedding\w*|eq|equal|erf|exp|exp2|expm1|exponential|fill|flip|floor"
        r"|floor_divide|fmod|full|gather|ge|gelu\w*|glu\w*|gt|hardtanh\w*|histc|index\w*|isfinite|isinf|isnan|le|leaky_relu\w*|lerp|linalg_vector_norm"
        r"|local_scalar_dense|log|log10|log1p|log2|logical_\w+|logsumexp|lt|masked_\w+|max|maximum|mean|min|minimum|mish\w*|mul|multinomial"
        r"|native_dropout\w*|ne|neg|nonzero\w*|norm|normal|one_hot|ones\w*|pad|pow|prod|rand\w*|reciprocal|relu\w*|remainder|repeat\w*|roll|round|rsqrt"
        r"|rsub|scalar_tensor|scatter\w*|select_backward|select_scatter|sgn|sigmoid\w*|sign|silu\w*|sin|slice_backward|slice_scatter|softplus\w*|sort|sqrt"
        r"|square|stack|std\w*|sub|sum|tanh\w*|threshold\w*|to_copy|topk|tril|triu|uniform|unique\w*|var\w*|where|zero|zeros\w*)_?$",
    ),
)
"""First match wins; others are unknown."""

_NVJET_OPERANDS = re.compile(r"^nvjet_(?:sm\d+_)?([a-z])([a-z])")
_OF_4_BITS = re.compile(r"^(bmm|gemm)_[A-Za-z\d]+_\w*E2m1")
_OF_16_BITS = re.compile(r"bf16|bfloat16|half|f16|16816|hgemm|h884|Cijk_[a-z]+_[a-z]+_[BH]", re.IGNORECASE)
_OF_32_BITS = re.compile(
    r"sgemm|s1688gemm|tf32|simt_|f32f32|dgemm|d884|\bfloat\b|\bdouble\b|scudnn|gcgemm|Cijk_[A-Za-z]+_[A-Za-z]+_[SD]"
)
_TYPES: dict[str, Family] = {
    "c10::BFloat16": "gemm_16bit",
    "c10::Half": "gemm_16bit",
    "float": "gemm_fp32",
    "double": "gemm_fp32",
}
"""The profiler's names of tensor types, with ``record_shapes``."""


def classify(
    name: str,
    operator: str | None = None,
    input_types: Sequence[str] = (),
    inside: Family | None = None,
    fp8_step: bool = True,
) -> Family:
    """Return the family of a kernel, or with an empty name of ``operator`` itself.

    ``operator`` is the innermost one that launched it, with ``input_types`` (empty if not recorded).
    ``inside`` is `work_inside` of the nearest operator around it. ``fp8_step``: the step has FP8 matmuls.
    """
    if _COMMUNICATION.search(name):
        return "communication"
    if _GENERATED.match(name):
        if inside == "optimizer":
            return inside
        if fp8_step and _GENERATED_CAST.search(name):
            return "cast"
        return next(family for family, pattern in _GENERATED_RULES if re.search(pattern, name))
    named = _named(name)
    if operator is not None and is_fp8_gemm(operator):
        return "cast" if named in ("pointwise", "copy", "cast") else "gemm_fp8"
    launched = _first(_OPERATOR_RULES, operator) if operator else None
    if named == _TYPED_GEMM or (named is None and launched == _TYPED_GEMM):
        return inside if inside in ("gemm_fp8", "attention") else _gemm(name, operator, input_types)
    if named not in (None, "pointwise", "copy"):
        return named
    if named != "copy" and any("Float8" in each for each in input_types):
        return "cast"
    if launched not in (None, "pointwise", _TYPED_GEMM) and named != "copy":
        return launched
    if inside is not None and (named != "copy" or (inside in ("cast", "gemm_fp8") and _OWN_COPY.match(name))):
        return "cast" if inside == "gemm_fp8" else inside
    return named or (launched if launched != _TYPED_GEMM else None) or "unknown"


@cache
def work_inside(operator: str) -> Family | None:
    """Return the family of all kernels inside this operator, or None if it varies.

    Also for autograd functions and optimizers' annotations. Inside an FP8 matmul, other work is a cast.
    """
    if is_fp8_gemm(operator):
        return "gemm_fp8"
    if _FP8_WORK.search(operator):
        return "cast"
    family = _first(_OPERATOR_RULES, operator)
    return family if family in ("optimizer", "loss", "attention", "norm") else None


@cache
def own_work(operator: str) -> Family | Literal["gemm"] | None:
    """Return what this operator computes; None if it only allocates, views or calls others."""
    return "gemm_fp8" if is_fp8_gemm(operator) else _first(_OPERATOR_RULES, operator)


def is_fp8_gemm(operator: str) -> bool:
    """Tell if this operator is an FP8 matmul, whatever its kernel."""
    return operator in FP8_OPERATORS or bool(_FP8_GEMM_OPERATOR.match(operator))


def _first(rules: _Rules, text: str) -> _Rule | None:
    return next((family for family, pattern in rules if re.search(pattern, text)), None)


def _named(name: str) -> _Rule | None:
    if not name:
        return None
    if _COPY.match(name):
        return "copy"
    if _TEMPLATE.match(name):
        return "attention" if "attention" in name else "gemm_fp8" if "_scaled_" in name else _TYPED_GEMM
    return _first(_NAME_RULES, name)


_MATRICES = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), slice(2)),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm", "aten::_addmm_activation"), slice(1, 3)),
}
"""Operator -> its multiplied arguments; the others are added or written to, in fp32 if 16-bit products are
accumulated in fp32."""


def _gemm(name: str, operator: str | None, input_types: Sequence[str]) -> Family:
    """Return a matmul's family by its matrices' types, else by its name."""
    matrices = input_types[_MATRICES.get(operator or "", slice(None))]
    if any("Float8" in each for each in matrices):
        return "gemm_fp8"
    families = {_TYPES[each] for each in matrices if each in _TYPES}
    if families:
        return "gemm_fp32" if "gemm_fp32" in families else "gemm_16bit"
    if operands := _NVJET_OPERANDS.match(name):
        return "gemm_fp32" if set(operands.groups()) <= {"s", "d"} else "gemm_16bit"
    if _OF_4_BITS.match(name):
        return "unknown"
    if _OF_16_BITS.search(name):
        return "gemm_16bit"
    return "gemm_fp32" if _OF_32_BITS.search(name) else "unknown"
