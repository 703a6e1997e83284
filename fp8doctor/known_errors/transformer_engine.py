"""Messages of Transformer Engine, once it is loaded."""

from __future__ import annotations

from fp8doctor.known_errors.known_error import KnownError

ATTENTION = "transformer_engine/pytorch/attention/dot_product_attention"

TRANSFORMER_ENGINE = (
    KnownError(
        says="FP8 execution requires the product of all dimensions except the last to be divisible by 8 "
        "and the "
        "last dimension to be divisible by 16",
        pattern=r"FP8 execution requires (the product of all dimensions except the last"
        r"|the (input|weight)'s product of all dimensions|2D input matrices with height divisible by 8)",
        cause="Batch x sequence is no multiple of 8, or a width no multiple of 16.",
        lines="collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=16)   # MXFP8: 32; widths "
        "in the "
        "model's configuration",
        versions="Transformer Engine 1.x (2D input matrices with height ...) to 2.20",
        source="transformer_engine/pytorch/utils.py:704 (2.20.2), 232 (1.13), 434 (2.5)",
        codes=("SHP001",),
    ),
    KnownError(
        says="Device compute capability 8.9 or higher required for FP8 execution",
        pattern=r"Device compute capability 8\.9 or higher required for FP8 execution",
        cause="This GPU has no FP8 tensor cores.",
        lines="with te.autocast(enabled=False):   # BF16; FP8 needs Ada, Hopper or Blackwell\n"
        "    output = model(**batch)",
        versions="Transformer Engine 1.0 to 2.20",
        source="transformer_engine/pytorch/quantization.py:154 (2.20.2), fp8.py (1.0 to 2.5)",
        codes=("GPU001",),
    ),
    KnownError(
        says="MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet; Device compute "
        "capability 10.0 or higher required for MXFP8 (or NVFP4) execution",
        pattern=r"MXFP8 \(for all gemm layouts\) is not supported on 12\.0\+ architectures"
        r"|Device compute capability 10\.0 or higher required for (MXFP8|NVFP4) execution",
        cause="The recipe needs a GPU of compute capability 10.x (B200, B300); RTX 50 and RTX PRO (12.x) "
        "lack "
        "MXFP8's transposed layouts.",
        lines="with te.autocast(recipe=Float8CurrentScaling()):   # Transformer Engine 2.9 and newer\n"
        "    output = model(**batch)",
        versions="Transformer Engine 2.0 and newer; the sentence on 12.0+ from 2.6 on",
        source="transformer_engine/pytorch/quantization.py:165, 168 and 175 (2.20.2), fp8.py:43 (2.0)",
        codes=("GPU002",),
    ),
    KnownError(
        says="FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9",
        pattern=r"FP8 block scaled GEMM requires (Hopper|compute capability 9\.0 or higher) and CUDA >= "
        r"12\.9",
        cause="Float8BlockScaling needs Hopper or newer and a torch that was built with CUDA 12.9 or newer.",
        lines="with te.autocast(recipe=Float8CurrentScaling()):   # Transformer Engine 2.9 and newer\n"
        "    output = model(**batch)",
        versions="Transformer Engine 2.3 (Hopper and CUDA >= 12.9) to 2.20",
        source="transformer_engine/pytorch/quantization.py:184 (2.20.2), fp8.py:62 (2.3)",
        codes=("GPU002",),
    ),
    KnownError(
        says="CublasLt version 12.1.3.x (or Cuda version 12.1) or higher required for FP8 execution on Ada",
        pattern=r"(CublasLt version 12\.1\.3\.x|Cuda version 12\.1) or higher required for FP8 execution "
        r"on Ada",
        cause="On compute capability 8.9 Transformer Engine needs cuBLAS 12.1.3, of CUDA 12.1 update 1, or "
        "newer: the first CUDA 12.1 is too old.",
        lines="pip install --upgrade torch   # built with CUDA 12.4 or newer",
        versions="Transformer Engine 1.0 to 2.20",
        source="transformer_engine/pytorch/quantization.py:156 (2.20.2); "
        "NVIDIA/TransformerEngine#955 and #682",
        codes=("GPU002",),
    ),
    KnownError(
        says="Data types for parameters must match when outside of autocasted region",
        pattern=r"Data types for parameters must match when outside of autocasted region",
        cause="Transformer Engine's layers hold another dtype than their input has, and no torch.autocast "
        "is on; "
        "te.autocast sets FP8 only.",
        lines='model.to(torch.bfloat16)   # or, around te.autocast, with torch.autocast("cuda", '
        "dtype=torch.bfloat16):",
        versions="Transformer Engine 1.0 to 2.20",
        source="transformer_engine/pytorch/module/base.py:1498 (2.20.2), 419 (1.0)",
        codes=("MEM003",),
    ),
    KnownError(
        says="Supported flash-attn versions are >= ..., < .... Found flash-attn ...",
        pattern=r"Supported flash-attn versions are >= ?[\w.]+, <=? ?[\w.]+\. Found flash-attn",
        cause="Transformer Engine leaves this flash-attn out and takes cuDNN's attention, or, where that "
        "takes "
        "not the mask or head size, an unfused one. It is a warning, not an error.",
        lines='pip install "flash-attn<2.8.4"   # what Transformer Engine 2.19 and 2.20 take; or use '
        "cuDNN's "
        "attention and let it be",
        versions="upper bound 2.7.3 in Transformer Engine 2.0, 2.7.4.post1 in 2.5, 2.8.1 in 2.9, 2.8.3 in "
        "2.16, "
        "2.8.4 in 2.19 and 2.20; on Blackwell 2.7.3 at least",
        source=f"{ATTENTION}/backends.py:137 and utils.py:124 (2.20.2); the same files of 2.0 to 2.19",
        codes=("MEM004",),
    ),
    KnownError(
        says="No dot product attention backend is available for the provided inputs",
        pattern=r"No dot product attention (backend is available|support) for the provided inputs",
        cause="Every attention of Transformer Engine was switched off (NVTE_FLASH_ATTN=0 with "
        "NVTE_FUSED_ATTN=0 "
        "and NVTE_UNFUSED_ATTN=0) or refuses this mask, head size, layout or FP8.",
        lines="unset NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN\n"
        "export NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2   # says why each was left out",
        versions="Transformer Engine 1.7 (attention support for ...) to 2.20",
        source=f"{ATTENTION}/dot_product_attention.py:2900 (2.20.2), attention.py:3962 (1.7)",
    ),
    KnownError(
        says="Could not find cuda_runtime.h in ...; NVRTC Error: ...",
        pattern=r"or disable NVRTC support with NVTE_DISABLE_NVRTC=1|\bNVRTC Error: NVRTC_ERROR_\w+",
        cause="Transformer Engine compiles some kernels while it runs, and lacks the CUDA headers, or they "
        "are "
        "those of another CUDA than NVRTC's.",
        lines="pip install nvidia-cuda-runtime   # headers of torch's CUDA; with CUDA 12 "
        "nvidia-cuda-runtime-cu12\n"
        "export NVTE_DISABLE_NVRTC=1           # or kernels that are compiled already",
        versions="Transformer Engine 1.4 to 2.20; 2.20 looks among pip's packages by itself",
        source="transformer_engine/common/util/cuda_runtime.cpp:256, logging.h:97 (2.19)",
    ),
    KnownError(
        says="Unable to find any suitable algorithms; Unable to find suitable cuBLAS GEMM algorithm",
        pattern=r"Unable to find (any suitable algorithms|suitable cuBLAS GEMM algorithm)",
        cause="cuBLASLt has no FP8 kernel for these sizes or this recipe on this GPU.",
        lines="recipe = Float8CurrentScaling()   # for a recipe that this GPU lacks; else pad tokens and "
        "widths to 16",
        versions="Transformer Engine 1.13 to 2.19",
        source="transformer_engine/common/gemm/cublaslt_gemm.cu:770 (main), 255 (1.13)",
        codes=("GPU002", "SHP001"),
    ),
)
