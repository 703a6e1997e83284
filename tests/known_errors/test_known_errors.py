"""Each known message as its library raises it or its source writes it, and texts that only look like one."""

from __future__ import annotations

import importlib.util
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8doctor import registry
from fp8doctor.known_errors import CUTEDSL, KNOWN_ERRORS, KnownError, recognise

F8 = torch.float8_e4m3fn


def by_start(says: str) -> KnownError:
    """The one entry whose words begin so."""
    (error,) = (each for each in KNOWN_ERRORS if each.says.startswith(says))
    return error


def fp8(*shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.ones(shape, device=device).to(F8)


def scaled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def float8_linear(width: int) -> None:
    from torchao.float8 import convert_to_float8_training

    model = convert_to_float8_training(nn.Sequential(nn.Linear(width, 32))).to("meta")
    model(torch.empty(16, width, device="meta"))


def row_major() -> None:
    scaled_mm(fp8(16, 32, device="meta"), fp8(32, 16, device="meta"))


def trained_inference_layer() -> None:
    scaled_mm(fp8(16, 32), fp8(16, 32).requires_grad_().t()).sum().backward()


def recomputed(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    calls = []

    def block(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return (change(x) if len(calls) == 1 else x).sin().float()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()


def saved_with_safetensors() -> None:
    from safetensors.torch import save
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    save(dict(convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config).state_dict()))


def moved_though_referred_to() -> None:
    """As DeepSpeed refers to the weights that Accelerate's torchao path has wrapped."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    elsewhere = weakref.ref(model[0].weight)
    model.bfloat16()
    assert elsewhere


def unknown_operation() -> None:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    torch.sin(Float8TrainingTensor(fp8(4, 4), torch.ones(()), torch.bfloat16, None))


def bf16_without_gpu() -> None:
    from transformers import TrainingArguments

    with patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=False):
        TrainingArguments(bf16=True)


def quantized_without_adapters(trainable: bool) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    model = nn.Linear(2, 2)
    vars(model)["is_quantized"] = True
    vars(model)["hf_quantizer"] = SimpleNamespace(
        is_trainable=trainable,
        is_qat_trainable=not trainable,
        quantization_config=SimpleNamespace(quant_method="fp8"),
    )
    validate_quantization_for_training(model)


RAISED: dict[str, tuple[Callable[[], object], ...]] = {
    "Expected trailing dimension": (lambda: float8_linear(30), lambda: float8_linear(36)),
    "mat2 must be col_major": (row_major,),
    "derivative for aten::_scaled_mm": (trained_inference_layer,),
    "Promotion for Float8 Types": (lambda: fp8(4) * torch.ones(4).bfloat16(),),
    '"add_stub" not implemented': (lambda: fp8(4) + fp8(4), lambda: fp8(4).max()),
    "expected m1 and m2": (lambda: nn.functional.linear(torch.ones(4, 4).bfloat16(), fp8(4, 4)),),
    "element 0 of tensors": (lambda: torch.ones(()).backward(),),
    "torch.utils.checkpoint: A different": (
        lambda: recomputed(torch.cos),
        lambda: recomputed(torch.Tensor.bfloat16),
    ),
    "Attempted to access the data pointer": (saved_with_safetensors,),
    "Couldn't swap Float8Linear.weight": (moved_though_referred_to,),
    "attempting to run aten": (unknown_operation,),
    "You cannot perform fine-tuning": (lambda: quantized_without_adapters(trainable=True),),
    "Your setup doesn't support bf16/gpu": (bf16_without_gpu,),
    "The model you are trying to fine-tune": (lambda: quantized_without_adapters(trainable=False),),
}
"""Beginning of what an entry says -> what makes the installed library raise it, on a CPU."""


@pytest.mark.parametrize(
    ("says", "raises"), [(says, each) for says, calls in RAISED.items() for each in calls]
)
def test_real_library_raises_it(says: str, raises: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as caught:
        raises()
    assert recognise(str(caught.value)) == (by_start(says),)


@pytest.mark.usefixtures("forget_accelerate")
def test_accelerate_raises_it() -> None:
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    with pytest.raises(ValueError, match="FP8 configuration") as caught:
        Accelerator(mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])
    assert recognise(str(caught.value)) == (by_start(PASSING),)


@pytest.mark.usefixtures("forget_accelerate")
@pytest.mark.parametrize(
    ("backend", "says"), [("torchao", "'TRANSFORMER_ENGINE' is"), ("TE", "TransformerEngine is")]
)
def test_accelerate_raises_it_of_the_backend(
    backend: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a model file does that makes its Accelerator in an environment that asks for FP8."""
    from accelerate import Accelerator
    from accelerate.utils import dataclasses

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    monkeypatch.setattr(dataclasses, "is_transformer_engine_available", lambda: False)
    with pytest.raises((ValueError, ImportError)) as caught:
        Accelerator(cpu=True)
    known = by_start(says)
    assert recognise(str(caught.value)) == (known,)
    assert "fp8doctor env" in known.cause


@pytest.mark.usefixtures("forget_accelerate")
def test_accelerate_raises_it_of_a_backend_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Trainer with bf16=True does whose launcher named torchao."""
    from accelerate import Accelerator

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    with pytest.raises(AttributeError) as caught:
        accelerator.prepare(nn.Linear(16, 16))
    assert recognise(str(caught.value)) == (by_start(WITHOUT_FP8),)


PASSING = "Passing in an FP8 configuration"
WITHOUT_FP8 = "'NoneType' object has no attribute"
OF_BACKENDS = ("TransformerEngine is not available", "'TRANSFORMER_ENGINE' is not a valid")

QUOTED = {
    "No module named 'unsloth.fp8_training'": (
        "ModuleNotFoundError: No module named 'unsloth.fp8_training'",
        "ImportError: cannot import name 'setup_fp8_mixed_precision_training' from 'unsloth'",
        "    from unsloth.fp8_training import FP8Trainer\nModuleNotFoundError: No module named 'unsloth'",
    ),
    "The 'deepspeed>=0.9.3' distribution": (
        "importlib.metadata.PackageNotFoundError: No package metadata was found for The 'deepspeed>=0.9.3' "
        "distribution was not found and is required by this application.",
    ),
    "Expected trailing dimension": (
        "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: "
        "(16x41).",
        "RuntimeError: mat2 shape (32x20) must be divisible by 16",
        "RuntimeError: mat2 shape (32x20 must be divisible by 16",
    ),
    "mat2 must be col_major": (
        "RuntimeError: Only multiplication of row-major and column-major matrices is supported by cuBLASLt",
    ),
    "torch._scaled_mm is only supported": (
        "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or "
        "8.9, or ROCm MI300+",
    ),
    "Multiplication of two Float8_e5m2": ("Multiplication of two Float8_e5m2 matrices is not supported",),
    "Only bf16 high precision output": (
        "Only bf16 high precsion output types are supported for row-wise scaling.",
        "Only bf16 high precision output types are supported for row-wise scaling.",
        "Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.",
    ),
    "DDPOptimizer backend": (
        "torch._dynamo.exc.BackendCompilerFailed: backend='compile_fn' raised:\nNotImplementedError: "
        "DDPOptimizer backend: Found a higher order op in the graph. This is not supported.",
    ),
    "backend='compile_fn'": (
        "torch._dynamo.exc.BackendCompilerFailed: backend='compile_fn' raised:\nRuntimeError: val\n\nWhile "
        "executing %submod_1 : [num_users=2] = call_module[target=submod_1]",
        "BackendCompilerFailed: backend='compile_fn' raised:\nAttributeError: 'bool' object has no attribute "
        "'op'\n\nWhile executing %submod_0",
    ),
    "torch._dynamo hit config": (
        "W1122 torch._dynamo hit config.recompile_limit (8)\n   function: 'forward' (model.py:12)",
        "torch._dynamo hit config.cache_size_limit (8)",
    ),
    "type fp8e4nv not supported": (
        'ValueError("type fp8e4nv not supported in this architecture. The supported fp8 dtypes are '
        "('fp8e4b15', 'fp8e5')\")",
    ),
    "CUBLAS_STATUS_NOT_SUPPORTED": (
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic( "
        "ltHandle, computeDesc.descriptor(), Adesc.descriptor()`",
    ),
    "mxfp8_quantize_... requires additional": (
        "NotImplementedError: mxfp8_quantize_cuda_3d requires additional Python runtime package(s): "
        "nvidia-cutlass-dsl. Please install `nvidia-cutlass-dsl` and `apache-tvm-ffi`.",
    ),
    "mxfp8_quantize_... requires CUDA": (
        "NotImplementedError: mxfp8_quantize_cuda_3d requires CUDA, SM 10.x, and CUDA 12.8+.",
        "AssertionError: SM100 kernels not available. Please use torchao CUDA 12.8+ build on SM100/100a "
        "device(s).",
    ),
    "nvfp4_mm_triton": ("nvfp4_mm_triton requires M, K, N all divisible by 128; got M=64, K=64, N=64",),
    "libtransformer_engine.so: undefined": (
        "OSError: libtransformer_engine.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal",
    ),
    "libcudnn...: undefined symbol": (
        "OSError: /usr/lib/libcudnn_graph.so.9: undefined symbol: _ZN5cudnn7backend9OperationE",
    ),
    "libcudnn...: cannot open": (
        "OSError: libcudnn.so.9: cannot open shared object file: No such file or directory",
        "RuntimeError: cudnn shared object not found.",
    ),
    "nvrtc shared object not found": (
        "RuntimeError: nvrtc shared object not found.",
        "RuntimeError: cublas shared object not found.",
    ),
    "Transformer Engine requires cuDNN": (
        "RuntimeError: Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.10.2.",
    ),
    "undefined symbol: _ZN3c10": (
        "ImportError: transformer_engine_torch.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        "ImportError: vllm/_C.abi3.so: undefined symbol: _ZNK2at10TensorBase14const_data_ptrIiEEPKT_v",
        "OSError: libtorchaudio.so: undefined symbol: _ZNK5torch8autograd4Node4nameEv",
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c10ltERKNS_6SymIntEi",
    ),
    "No module named 'transformer_engine_torch'": (
        "ModuleNotFoundError: No module named 'transformer_engine_torch'",
        "FileNotFoundError: Could not find shared object file for Transformer Engine torch lib.",
        "RuntimeError: Found empty `transformer-engine` meta package installed. Install",
    ),
    "Transformer Engine package version": (
        "AssertionError: Transformer Engine package version mismatch. Found transformer_engine_torch v2.9",
        "AssertionError: TransformerEngine package version mismatch. Found",
    ),
    "module 'transformer_engine' has no": (
        "AttributeError: module 'transformer_engine' has no attribute 'pytorch'",
    ),
    "FP8 execution requires": (
        "ValueError: FP8 execution requires the product of all dimensions except the last to be divisible "
        "by 8 "
        "and the last dimension to be divisible by 16, but got tensor with dims=[7, 64] (product of leading "
        "dims = 7, last dim = 64)",
        "AssertionError: FP8 execution requires 2D input matrices with height divisible by 8 and width "
        "divisible by 16, but got tensor with dims=[7, 64]",
        "FP8 execution requires the input's product of all dimensions except the last to be divisible by 8",
    ),
    "Device compute capability 8.9": (
        "AssertionError: Device compute capability 8.9 or higher required for FP8 execution.",
    ),
    "MXFP8 (for all gemm layouts)": (
        "AssertionError: MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet.",
        "AssertionError: Device compute capability 10.0 or higher required for MXFP8 execution.",
        "AssertionError: Device compute capability 10.0 or higher required for NVFP4 execution.",
    ),
    "FP8 block scaled GEMM": (
        "AssertionError: FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.",
        "AssertionError: FP8 block scaled GEMM requires Hopper and CUDA >= 12.9.",
    ),
    "CublasLt version 12.1.3.x": (
        "CublasLt version 12.1.3.x or higher required for FP8 execution on Ada.",
        "Cuda version 12.1 or higher required for FP8 execution on Ada.",
    ),
    "Data types for parameters": (
        "TypeError: Data types for parameters must match when outside of autocasted region.  Found input "
        "dtype: "
        "torch.float32 and 'weight' dtype: torch.bfloat16",
    ),
    "Supported flash-attn versions": (
        "WARNING: Supported flash-attn versions are >= 2.1.1, < 2.8.4. Found flash-attn 2.9.0.",
        "Supported flash-attn versions are >= 2.1.1, <= 2.7.4.post1. Found flash-attn 2.8.3.",
    ),
    "No dot product attention": (
        "ValueError: No dot product attention backend is available for the provided inputs. Please run with "
        "NVTE_DEBUG=1",
        "Exception: No dot product attention support for the provided inputs!",
    ),
    "Could not find cuda_runtime.h": (
        "Could not find cuda_runtime.h in NVTE_CUDA_INCLUDE_DIR=<unset>, CUDA_HOME=<unset>. Specify path "
        "to CUDA "
        "Toolkit headers with NVTE_CUDA_INCLUDE_DIR or disable NVRTC support with NVTE_DISABLE_NVRTC=1.",
        "transformer_engine/common/util/rtc.cpp:242 in function compile: NVRTC Error: "
        "NVRTC_ERROR_COMPILATION",
    ),
    "Unable to find any suitable": (
        "cublaslt_gemm.cu:772 in function cublas_gemm: Unable to find any suitable algorithms",
        "Unable to find suitable cuBLAS GEMM algorithm",
    ),
    "Using `fp8` precision requires": (
        "ValueError: Using `fp8` precision requires `transformer_engine` or `MS-AMP` to be installed.",
        "ValueError: Using `fp8` precision requires `transformer_engine` to be installed.",
        "ImportError: Tried to train with `fp8` and auto-detect backend, but no FP8-compatible backend was "
        "installed. Valid backends are: `torchao`, `transformer-engine`, and `msamp`.",
    ),
    "You must pass a model and an optimizer": (
        "ValueError: You must pass a model and an optimizer together to `accelerate.prepare()` when using "
        "TransformerEngine.",
    ),
    "torchao with FSDP2": (
        "ValueError: torchao with FSDP2 and cpu_ram_efficient_loading is not supported, setting "
        "`cpu_ram_efficient_loading` to False will fix the issue and work as intended.",
    ),
    "`AcceleratorState` object": (
        "AttributeError: `AcceleratorState` object has no attribute `fsdp_plugin`. This happens if "
        "`AcceleratorState._reset_state()` was called",
    ),
    "MXFP8 block scaling is not available": (
        "ValueError: MXFP8 block scaling is not available: Device compute capability",
        "MXFP8 block scaling is not available on HPU.",
    ),
    "The current device has compute capability": (
        "The current device has compute capability of (8, 0) which is insufficient for FP8 mixed precision "
        "training (requires a GPU Hopper/Ada Lovelace or higher, compute capability of 8.9 or higher). "
        "Will use "
        "FP16 instead.",
    ),
    "FP8 quantized models is only supported": (
        "FP8 quantized models is only supported on GPUs with compute capability >= 8.9 (e.g 4090/H100), "
        "actual "
        "= `8.0`.",
        "ValueError: FP8 quantized models is only supported on GPUs with compute capability >= 9.0 (e.g "
        "H100)",
    ),
    "Unsloth: On the fly `load_in_fp8`": (
        "ValueError: Unsloth: On the fly `load_in_fp8` requires H100 GPUs or after. Try `unsloth/Qwen3-8B` "
        "instead.",
        "ValueError: Unsloth: On the fly `load_in_fp8` requires torch 2.9.0+. Try `unsloth/Qwen3-8B` "
        "instead.",
        "ValueError: Unsloth: `load_in_fp8` requires torchao 0.15.0+ (or nightly).",
    ),
    "Unsloth: `load_in_fp8` is not compatible": (
        "ValueError: Unsloth: `load_in_fp8` is not compatible with full finetuning",
    ),
    "Unsloth: float8_training": (
        "RuntimeError: Unsloth: float8_training = 'tensorwise' has not been measured faster than bfloat16 on "
        "NVIDIA H100 80GB HBM3 (compute capability 9.0)",
        "RuntimeError: Unsloth: float8_training needs compute capability 8.9+ (fp8 tensor cores)",
        "RuntimeError: Unsloth: float8_training with tensorwise scaling gives NaN gradients on compute "
        "capability 8.9 (NVIDIA L4).",
    ),
    "Unsloth: FP8 quantization is only": (
        "ValueError: Unsloth: FP8 quantization is only supported on L4 and higher GPUs with compute "
        "capability "
        "8.9 or higher.",
    ),
}
"""Beginning of what an entry says -> the text as its source writes it; the sources stand in the entries."""


@pytest.mark.parametrize(
    ("says", "message"), [(says, message) for says, messages in QUOTED.items() for message in messages]
)
def test_quoted_message_is_known(says: str, message: str) -> None:
    assert recognise(message) == (by_start(says),)


def test_every_entry_has_been_raised_or_quoted() -> None:
    tried = {by_start(says) for says in (*RAISED, PASSING, WITHOUT_FP8, *OF_BACKENDS, *QUOTED)}
    assert tried == set(KNOWN_ERRORS)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            "accelerate.state",
            "Using `fp8` precision requires `transformer_engine` or `MS-AMP` to be installed.",
        ),
        (
            "accelerate.state",
            "insufficient for FP8 mixed precision training (requires a GPU Hopper/Ada Lovelace ",
        ),
        (
            "accelerate.accelerator",
            "Tried to train with `fp8` and auto-detect backend, but no FP8-compatible",
        ),
        (
            "accelerate.accelerator",
            "You must pass a model and an optimizer together to `accelerate.prepare()` when using "
            "TransformerEngine.",
        ),
        ("accelerate.accelerator", "torchao with FSDP2 and cpu_ram_efficient_loading is not supported"),
        ("accelerate.utils.transformer_engine", "MXFP8 block scaling is not available: {message}"),
        (
            "transformers.quantizers.quantizer_finegrained_fp8",
            "FP8 quantized models is only supported on GPUs with compute capability >= 8.9",
        ),
        (
            "transformers.quantizers.quantizer_fbgemm_fp8",
            "FP8 quantized models is only supported on GPUs with compute capability >= 9.0",
        ),
        ("torch._dynamo.convert_frame", "torch._dynamo hit config.%s (%s)"),
    ],
)
def test_installed_source_still_writes_it(module: str, words: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    joined = re.sub(r'"\s*f?"', "", Path(spec.origin).read_text("utf-8"))
    assert words in joined


NEAR_MISSES = (
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x41 and 40x20)",
    "AssertionError: hidden size 1000 must be divisible by 16",
    "Expected hidden_size to be divisible by 16",
    "derivative for aten::_fused_thing is not implemented",
    "\"addmm_impl_cpu_\" not implemented for 'Half'",
    "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16",
    "RuntimeError: Promotion of types failed",
    "The 'tokenizers>=0.22' distribution was not found and is required by this application.",
    "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly",
    "RuntimeError: element 1 of tensors does not require grad and does not have a grad_fn",
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "ImportError: mine.so: undefined symbol: _Z9my_kernelv",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa`",
    "flash-attn is not installed",
    "ModuleNotFoundError: No module named 'transformer_engine'",
    "Device compute capability 8.0 found",
    "DDPOptimizer used bucket cap 26214400 and created 3 buckets.",
    "pkg_resources: package version mismatch",
    "OSError: torch/lib/../../nvidia/cublas/lib/libcublas.so.11: undefined symbol: cublasLtGetStatusString, "
    "version libcublasLt.so.11",
    "ImportError: pywrap_tf.so: undefined symbol: _ZN4absl12lts_202206239StrFormat2Es",
    "RuntimeError: cuDNN flash attention requires cuDNN 9.1.0 or later",
    "OSError: Could not find shared object file libnccl-net.so",
    "NotImplementedError: NF4Tensor dispatch: attempting to run aten.cat.default, this is not supported",
    "RuntimeError: \"_tunable_scaled_gemm\" not implemented for 'Float8_e4m3fn'",
    "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b8', "
    "'fp8e5b16')\")",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AttributeError: `AcceleratorState` object has no attribute `mixed_precision`",
    "KeyError: 'fp8'",
    "AttributeError: 'NoneType' object has no attribute 'config_class'",
    "We use fp8 with mixed_precision='fp8' and load_in_fp8=True, is that right?",
)


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_text_that_only_looks_like_one_is_not_known(text: str) -> None:
    """Messages of other libraries, and of other causes, that were seen in public issues."""
    assert recognise(text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "The 'deepspeed-kernels' distribution was not found and is required by this application.",
        "backend='compile_fn' raised:\nRuntimeError: val is not a tensor",
        "    from unsloth.fp8_training import FP8Trainer\n"
        '  File "/fork/unsloth/fp8_training.py", line 3, in <module>\n'
        "    import kernels_of_the_fork\nModuleNotFoundError: No module named 'kernels_of_the_fork'",
    ],
)
def test_text_that_begins_like_one_is_not_known(text: str) -> None:
    assert recognise(text) == ()


def test_older_text_of_an_entry_is_known() -> None:
    old = "ValueError: Passing in a `FP8RecipeKwargs` object requires setting `mixed_precision='fp8'`."
    assert recognise(old) == (by_start(PASSING),)


def test_pasted_traceback_gives_each_of_its_errors_in_their_order() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/somebody/train.py", line 3, in <module>\n'
        "ImportError: libtransformer_engine.so: undefined\n    symbol: cublasLtMatmulDescInit_internal\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "AttributeError: module 'transformer_engine' has no attribute\r\n'pytorch'\n"
    )
    assert [each.says for each in recognise(text)] == [
        by_start("libtransformer_engine.so").says,
        by_start("module 'transformer_engine'").says,
    ]


@pytest.mark.slow
def test_long_text_is_read_from_its_end() -> None:
    assert recognise("0 " * 700_000 + "RuntimeError: derivative for aten::_scaled_mm is not implemented")


@pytest.mark.slow
@pytest.mark.parametrize(
    "word", ["libcudnn", "mxfp8_quantize_", '"', "_Z", "undefined symbol: _Z", "NVRTC_ERROR_", "Unsloth: "]
)
def test_hostile_text_takes_no_longer_than_any_other(word: str) -> None:
    """A pattern that begins at each of these words and reads on to the end would take hours."""
    assert recognise(word * (600_000 // len(word))) == ()


def test_codes_are_those_of_checks() -> None:
    known = {check.code for check in registry.discover()}
    assert {code for error in KNOWN_ERRORS for code in error.codes} <= known


def test_entries_are_whole() -> None:
    for error in KNOWN_ERRORS:
        assert all((error.says, error.pattern, error.cause, error.lines, error.versions, error.source))
        assert error.cause.endswith(".")
        assert not error.versions.endswith(".")
        assert not error.source.endswith(".")


def test_the_packages_of_mxfp8_casts_are_pinned_as_their_check_pins_them() -> None:
    (known,) = recognise("mxfp8_quantize_cuda_3d requires additional Python runtime package(s): x")
    assert known.lines == f"pip install {' '.join(CUTEDSL.values())}"
