"""Messages of torch, its compiler, Triton, cuBLAS and torchao."""

from __future__ import annotations

from fp8doctor.known_errors.known_error import KnownError

SCALED_MM = "torch aten/src/ATen/native/cuda/ScaledBlas.cpp (main, 0174dfa; Blas.cpp before)"
"""Where torch's FP8 GEMM checks what it gets."""

CUTEDSL = {
    "apache-tvm-ffi": "apache-tvm-ffi",
    "nvidia-cutlass-dsl": "nvidia-cutlass-dsl==4.5.2 nvidia-cutlass-dsl-libs-base==4.5.2 "
    "nvidia-cutlass-dsl-libs-cu13==4.5.2",
}
"""Package that torchao's MXFP8 casts of experts need -> what to install for it. Source: METADATA of torchao
0.18.0."""

TORCH_AND_TORCHAO = (
    KnownError(
        says="Expected trailing dimension of mat1 to be divisible by 16; mat2 shape ... must be divisible "
        "by 16",
        pattern=r"(Expected (trailing dimension of mat1|self\.size\(1\)|both dimensions of mat2)"
        r"|mat2 shape \(\d+x\d+\)?) (to|must) be divisible by 16",
        cause="A side of an FP8 GEMM is no multiple of 16: in_features or out_features of a layer, or, in "
        "the "
        "backward, the tokens of the step.",
        lines="config = Float8LinearConfig(pad_inner_dim=True)   # pads the tokens; widths are padded in the "
        "model, or the layer is left out by module_filter_fn",
        versions="every torch with torch._scaled_mm; the words with self.size(1) are those of meta tensors "
        "and "
        "torch.compile",
        source=f"{SCALED_MM}; torch/_meta_registrations.py (2.13.0, raised on a CPU)",
        codes=("SHP001",),
    ),
    KnownError(
        says="mat2 must be col_major; Only multiplication of row-major and column-major matrices is "
        "supported",
        pattern=r"mat2 must be col_major, got stride|Only multiplication of row-major and column-major "
        r"matrices"
        r" is supported by cuBLASLt",
        cause="FP8 tensor cores before Blackwell take the second matrix by columns only, and a transpose "
        "or a "
        "contiguous() made it lie by rows.",
        lines="torch._scaled_mm(a, b.t().contiguous().t(), ...)   # by columns; torchao's layers do that "
        "themselves",
        versions="every torch with torch._scaled_mm; on CUDA below compute capability 10.0",
        source=f"{SCALED_MM}; torch/_meta_registrations.py (2.13.0, raised on a CPU)",
    ),
    KnownError(
        says="torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or "
        "ROCm MI300+",
        pattern=r"torch\._scaled_mm is only supported on CUDA devices with compute capability",
        cause="This GPU has no FP8 tensor cores.",
        lines="model.to(torch.bfloat16)   # train in BF16, without the conversion to FP8; FP8 needs compute "
        "capability 8.9 or higher",
        versions="every torch with torch._scaled_mm",
        source=SCALED_MM,
        codes=("GPU001",),
    ),
    KnownError(
        says="Multiplication of two Float8_e5m2 matrices is not supported",
        pattern=r"Multiplication of two Float8_e5m2 matrices is not supported",
        cause="Both sides of a GEMM are float8_e5m2, which cuBLASLt does not multiply; e5m2 is for "
        "gradients.",
        lines="x.to(torch.float8_e4m3fn)   # weights and activations in e4m3",
        versions="every torch with torch._scaled_mm, not on ROCm",
        source=SCALED_MM,
    ),
    KnownError(
        says="Only bf16 high precision output types are supported for row-wise scaling",
        pattern=r"Only bf16[\w, ]{0,20} high prec\w+ output types are supported for row-wise scaling",
        cause="The layer runs with one scale per row in another dtype than the kernel takes: fp32 without "
        "autocast, or fp16.",
        lines='with torch.autocast("cuda", dtype=torch.bfloat16):   # or model.to(torch.bfloat16)\n'
        "    output = model(**batch)",
        versions="first bf16 alone, in newer torch fp16 too, on main fp32 as well",
        source=SCALED_MM,
        codes=("MEM003",),
    ),
    KnownError(
        says="derivative for aten::_scaled_mm is not implemented",
        pattern=r"derivative for aten::_scaled_mm(_v2)? is not implemented",
        cause="A layer that was made for inference in FP8 is trained: it calls torch._scaled_mm without the "
        "backward that FP8 training layers bring.",
        lines="convert_to_float8_training(model)   # on BF16 weights, in the place of quantize_(model, "
        "Float8DynamicActivationFloat8WeightConfig())",
        versions="every torch with torch._scaled_mm; torchao's Float8Tensor in pytorch/ao#4376",
        source="torch 2.13.0, raised on a CPU",
        codes=("MOD003",),
    ),
    KnownError(
        says="Promotion for Float8 Types is not supported, attempted to promote Float8_e4m3fn and BFloat16",
        pattern=r"Promotion for Float8 Types is not supported, attempted to promote",
        cause="A tensor in FP8 met one in another dtype outside an FP8 layer: weights of an FP8 checkpoint "
        "in "
        "ordinary layers, or a .to(float8) of the whole model.",
        lines="AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)   # FP8 dtypes store, they "
        "do "
        "not compute; then convert_to_float8_training(model)",
        versions="torch with float8 dtypes",
        source="torch 2.13.0, raised on a CPU",
        codes=("MOD003",),
    ),
    KnownError(
        says="\"add_stub\" not implemented for 'Float8_e4m3fn' (or another kernel)",
        pattern=r"\"(?!_tunable)\w{1,80}\" not implemented for '(Float8_|Float4_)\w+'",
        cause="An ordinary operation ran on a tensor in FP8. FP8 dtypes have casts and scaled GEMMs only: "
        "the "
        "model itself was cast to float8, or an FP8 checkpoint was loaded into ordinary layers.",
        lines="model.to(torch.bfloat16)   # then convert_to_float8_training(model)",
        versions="torch with float8 dtypes",
        source="torch 2.13.0, raised on a CPU",
        codes=("MOD003",),
    ),
    KnownError(
        says="expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != c10::Float8_e4m3fn",
        pattern=r"expected (m1|mat1) and (m2|mat2) to have the same dtype, but got: "
        r"(\S+ != c10::Float8_\w+|c10::Float8_\w+ != )",
        cause="An ordinary Linear holds an FP8 weight: the checkpoint's FP8 weights were loaded, and its FP8 "
        "layers were not built.",
        lines="AutoModelForCausalLM.from_pretrained(name)   # with the checkpoint's quantization_config; or "
        "FineGrainedFP8Config(dequantize=True)",
        versions="torch with float8 dtypes",
        source="torch 2.13.0, raised on a CPU",
        codes=("MOD003",),
    ),
    KnownError(
        says="element 0 of tensors does not require grad and does not have a grad_fn",
        pattern=r"element 0 of tensors does not require grad and does not have a grad_fn",
        cause="Nothing between the loss and a trainable weight keeps gradients. In FP8 jobs: FP8Linear of "
        "transformers before 5.22, which has no backward; or adapters behind a checkpointed frozen base "
        "whose "
        "inputs need no gradient.",
        lines="pip install --upgrade transformers   # 5.22 or newer, for FP8 checkpoints\n"
        "model.enable_input_require_grads()      # for adapters with reentrant checkpointing",
        versions="transformers 4.57 to 5.21 for FP8Linear; every torch",
        source="torch 2.13.0, raised on a CPU",
        codes=("MOD003",),
    ),
    KnownError(
        says="torch.utils.checkpoint: A different number of tensors was saved during the original forward "
        "and "
        "recomputation",
        pattern=r"torch\.utils\.checkpoint: (A different number of tensors was saved during the original"
        r"|Recomputed values for the following tensors have different metadata"
        r"|trying to save more tensors during recomputation)",
        cause="The recompute did not do what the forward did. With Transformer Engine: its autocast is "
        "closed when torch's checkpoint recomputes, so that the layers run in BF16. Other causes have "
        "nothing to do with FP8, such as a router or a cache that answers otherwise the second time.",
        lines="x = te.checkpoint(block, x)   # in the place of torch.utils.checkpoint, around Transformer "
        "Engine's layers",
        versions="use_reentrant=False; with reentrant checkpointing nothing is raised",
        source="torch/utils/checkpoint.py (2.13.0, raised on a CPU); Transformer Engine 2.20.2 on an H200",
        codes=("CKP002",),
    ),
    KnownError(
        says="Attempted to access the data pointer on an invalid python storage",
        pattern=r"Attempted to access the data pointer on an invalid python storage",
        cause="A weight is a wrapper without storage of its own, as torchao makes them for FSDP's float8 "
        "all-gather and for MXFP8 training; safetensors cannot write it.",
        lines="export ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER=false   # or "
        "Float8LinearConfig(enable_fsdp_float8_all_gather=False)",
        versions="any torchao that wraps weights",
        source="torch 2.13.0 and torchao 0.18.0, raised on a CPU",
        codes=("MOD010",),
    ),
    KnownError(
        says="attempting to run aten...., this is not supported",
        pattern=r"(?<!dispatch: )attempting to run aten\.[\w.]+, this is not supported",
        cause="An operation reached torchao's Float8TrainingTensor that it has no FP8 form for.",
        lines="convert_to_float8_training(model, module_filter_fn=lambda module, name: name not in NAMES)  "
        " # "
        "without the module that the traceback names",
        versions="torchao 0.10 to 0.18",
        source="torchao/float8/float8_training_tensor.py:375 (0.18.0, raised on a CPU)",
    ),
    KnownError(
        says="DDPOptimizer backend: Found a higher order op in the graph",
        pattern=r"DDPOptimizer backend: Found a higher order op in the graph",
        cause="torch.compile outside DDP splits the graph by DDP's buckets, and the graph holds a region, "
        "such "
        "as a checkpointed block, that cannot be split.",
        lines="for block in model.model.layers:   # compile inside DDP, block by block\n"
        "    block.compile()\n"
        "torch._dynamo.config.optimize_ddp = False   # or one bucket, which overlaps less",
        versions="torch before 2.11, which does not raise it any more (pytorch#104674)",
        source="torch/_dynamo/backends/distributed.py (read in an older version; absent from 2.11.0, 2.13.0)",
    ),
    KnownError(
        says="backend='compile_fn' raised: ...",
        pattern=r"backend='compile_fn' raised: "
        r"(RuntimeError: val( While executing|$)|AttributeError: 'bool' object has no attribute 'op')",
        cause="Dynamo splits the graph at the ends of DDP's buckets, and FP8 layers of torchao before 0.13 "
        "do not survive the split.",
        lines='pip install "torchao>=0.13.0"     # or torch._dynamo.config.optimize_ddp = False',
        versions="torchao 0.10 and 0.12, not 0.13 and later (pytorch/ao#2586)",
        source="tests/versions/ddp_and_compile.md (raised on a CPU, torch 2.8.0)",
        codes=("CMP008",),
    ),
    KnownError(
        says="torch._dynamo hit config.recompile_limit (8)",
        pattern=r"torch\._dynamo hit config\.(recompile_limit|cache_size_limit|accumulated_\w+_limit)",
        cause="A function was compiled as often as the limit allows, for that many different inputs, and "
        "runs eagerly from then on; eager FP8 layers are several times slower. Usual "
        "reasons: a KV cache that builds in training, and batches of every length.",
        lines="model.config.use_cache = False   # and pad batches to a few lengths",
        versions="cache_size_limit in older torch",
        source="torch/_dynamo/convert_frame.py:1995 (2.13.0)",
        codes=("CMP005",),
    ),
    KnownError(
        says="type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', "
        "'fp8e5')",
        pattern=r"type fp8e4nv not supported in this architecture\. The supported fp8 dtypes are "
        r"\('fp8e4b15'",
        cause="Triton compiles no float8_e4m3fn for this GPU: compute capability below 8.9.",
        lines="# BF16 on this GPU: torchao's emulate=True runs there, slowly",
        versions="read in Triton 3.6.0",
        source="triton/language/core.py:574 (3.6.0)",
        codes=("GPU001",),
    ),
    KnownError(
        says="CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`",
        pattern=r"CUBLAS_STATUS_NOT_SUPPORTED when calling `(cublasLtMatmul|CUBLAS_STATUS_NOT_SUPPORTED)",
        cause="cuBLASLt has no kernel for this product. In FP8 jobs: a recipe that the GPU or its cuBLAS "
        "does "
        "not have (scales per row, MXFP8), or sides that FP8 does not take.",
        lines='config = Float8LinearConfig.from_recipe_name("tensorwise")   # runs on every GPU with FP8 '
        "tensor "
        "cores",
        versions="every torch with cuBLASLt; BF16 GEMMs can raise it too",
        source="torch aten/src/ATen/cuda/CUDABlas.cpp (scaled_gemm: no algorithm was returned)",
        codes=("GPU002", "SHP001"),
    ),
    KnownError(
        says="mxfp8_quantize_... requires CUDA, SM 10.x, and CUDA 12.8+; SM100 kernels not available",
        pattern=r"mxfp8_quantize_\w{1,40} requires CUDA, SM 10\.x, and CUDA 12\.8\+"
        r"|SM100 kernels not available\. Please use torchao CUDA 12\.8\+ build",
        cause="MXFP8 needs a GPU of compute capability 10.x and a torchao built with CUDA 12.8 or newer.",
        lines="config = Float8LinearConfig()   # FP8 with one scale per tensor runs on 8.9 and higher",
        versions="torchao 0.18",
        source="torchao/prototype/moe_training/kernels/mxfp8/quant.py, mxfp8_grouped_mm.py (0.18.0)",
        codes=("GPU002", "ENV004"),
    ),
    KnownError(
        says="mxfp8_quantize_... requires additional Python runtime package(s)",
        pattern=r"mxfp8_quantize_\w{1,40} requires additional Python runtime package\(s\)",
        cause="torchao's MXFP8 casts for experts are CuTe DSL kernels, whose two packages it does not "
        "install.",
        lines=f"pip install {' '.join(CUTEDSL.values())}",
        versions="torchao 0.18",
        source="torchao/prototype/moe_training/kernels/mxfp8/quant.py:1470 (0.18.0)",
    ),
    KnownError(
        says="nvfp4_mm_triton requires M, K, N all divisible by 128",
        pattern=r"nvfp4_mm_triton requires M, K, N all divisible by 128",
        cause="torchao's NVFP4 layer takes widths and tokens in multiples of 128 only.",
        lines="# pad the tokens of a step and the widths to multiples of 128, or leave the layer in BF16",
        versions="torchao 0.18",
        source="torchao/prototype/moe_training/nvfp4_training/nvfp4_linear.py:96 (0.18.0)",
        codes=("SHP001",),
    ),
)
