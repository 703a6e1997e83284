"""Each known message as the installed library raises it; messages that were collected after the table."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.checkpoint import checkpoint

from fp8doctor.known_errors import recognise, recognise_all
from tests.known_errors.test_texts import by_start

F8 = torch.float8_e4m3fn


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


def scaled_by(scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
    a, b = (fp8(128, 128, device="meta") for _ in "ab")
    torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def unaligned_experts() -> None:
    experts = on_meta(2, 40, 33, dtype=torch.bfloat16).transpose(-2, -1)
    torch._grouped_mm(on_meta(20, 33, dtype=torch.bfloat16), experts, offs=on_meta(2, dtype=torch.int32))


def extra_state_of_another_size() -> None:
    from torch.distributed import checkpoint as dcp

    with TemporaryDirectory() as folder:
        dcp.save({"a._extra_state": torch.zeros(9)}, checkpoint_id=folder, no_dist=True)
        dcp.load({"a._extra_state": torch.zeros(4)}, checkpoint_id=folder, no_dist=True)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: object) -> None:
        """Accept anything."""


def checkpoint_of_an_ordinary_layer() -> None:
    nn.Sequential(WithExtraState(4, 4)).load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict())


def gathered_in_fp8_by_row() -> None:
    from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity

    by_row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    Float8LinearConfig(
        enable_fsdp_float8_all_gather=True,
        cast_config_input=by_row,
        cast_config_weight=by_row,
        cast_config_grad_output=by_row,
    )


def recipe_of_another_name() -> None:
    from torchao.float8 import Float8LinearConfig

    Float8LinearConfig.from_recipe_name("blockwise")


def padded_experts() -> None:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

    offsets = torch.tensor([8, 20], dtype=torch.int32)
    _to_fp8_rowwise_then_scaled_grouped_mm(torch.empty(20, 32), torch.empty(2, 32, 48), offsets)


def quantized_without_gpu() -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, quantize_

    quantize_(
        nn.Sequential(nn.Linear(32, 32)), Float8DynamicActivationFloat8WeightConfig(set_inductor_config=False)
    )


def quantized_checkpoint(**options: object) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder, **options)


def quantized(config: str) -> None:
    import transformers

    quantized_checkpoint(quantization_config=getattr(transformers, config)())


def unknown_quantization() -> None:
    from transformers.quantizers.auto import AutoQuantizationConfig

    AutoQuantizationConfig.from_dict({"quant_method": "fp9"})


def another_quantization() -> None:
    from transformers import BitsAndBytesConfig, FineGrainedFP8Config
    from transformers.quantizers.auto import AutoHfQuantizer

    config = BitsAndBytesConfig(load_in_8bit=True)
    AutoHfQuantizer.merge_quantization_configs(FineGrainedFP8Config(), config)


def quantization_by_name() -> None:
    from transformers import TorchAoConfig

    TorchAoConfig("float8_weight_only")


def without_cuda_home() -> None:
    from torch.utils import cpp_extension

    with patch.object(cpp_extension, "CUDA_HOME", None):
        cpp_extension._join_cuda_home("bin")


def old_torchao() -> None:
    from peft import import_utils

    import_utils.is_torchao_available.cache_clear()
    with patch.object(import_utils.importlib_metadata, "version", return_value="0.7.0"):
        import_utils.is_torchao_available()


def imported(module: str, name: str) -> None:
    exec(f"from {module} import {name}")


RAISES = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, OSError, CheckpointException)

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
    "Invalid scaling": (
        lambda: scaled_by(on_meta(128), on_meta(128)),
        lambda: scaled_by(on_meta(128, 2), on_meta(2, 128)),
    ),
    "Invalid blockwise": (lambda: scaled_by(*(on_meta(8, dtype=torch.float8_e8m0fnu) for _ in "ab")),),
    "Expected both inputs": (
        lambda: scaled_mm(on_meta(16, 32, dtype=torch.bfloat16), fp8(16, 32, device="meta").t()),
    ),
    "strides should be": (unaligned_experts,),
    "couldn't find storage": (lambda: torch.set_default_dtype(F8),),
    "Missing key(s)": (checkpoint_of_an_ordinary_layer,),
    "Size mismatch between": (extra_state_of_another_size,),
    "enable_fsdp_float8": (gathered_in_fp8_by_row,),
    "recipe_name": (recipe_of_another_name,),
    "pad_token_groups": (padded_experts,),
    "Float8 dynamic": (quantized_without_gpu,),
    "cannot import name 'mxfp8_cuda'": (lambda: imported("torchao.prototype", "mxfp8_cuda"),),
    "cannot import name 'float8_weight": (lambda: imported("torchao.quantization", "float8_weight_only"),),
    "Unknown quantization type": (unknown_quantization,),
    "No GPU or XPU": (lambda: quantized("FineGrainedFP8Config"),),
    "Using fbgemm": (lambda: quantized("FbgemmFp8Config"),),
    "The model is quantized": (another_quantization,),
    "String-based": (quantization_by_name,),
    "__init__() got": (lambda: quantized_checkpoint(load_in_fp8=True),),
    "CUDA_HOME environment": (without_cuda_home,),
    "Found an incompatible": (old_torchao,),
    "Only Tensors of": (lambda: nn.Parameter(torch.zeros(2, dtype=torch.int8)),),
}
"""Beginning of what an entry says -> what makes the installed library raise it, on a CPU."""


@pytest.mark.parametrize(
    ("says", "raises"), [(says, each) for says, calls in RAISED.items() for each in calls]
)
def test_real_library_raises_it(says: str, raises: Callable[[], object]) -> None:
    with pytest.raises(RAISES) as caught:
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


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("heldout.toml", {"right": 11, "half": 1, "wrong": 2, "none": 23}),
        ("heldout_second.toml", {"right": 12, "half": 7, "wrong": 2, "none": 19}),
        ("heldout_third.toml", {"right": 7, "half": 9, "wrong": 2, "none": 20}),
        ("heldout_fourth.toml", {"right": 12, "half": 13, "wrong": 2, "none": 13}),
    ],
)
def test_messages_collected_after_the_table_are_answered_as_they_were(
    name: str, verdicts: dict[str, int]
) -> None:
    """The rate of the table at the time; what was right stays known, unless its message was withdrawn."""
    table = tomllib.loads(Path(__file__).with_name(name).read_text("utf-8"))["heldout"]
    assert Counter(each["then"] for each in table) == verdicts
    right = [each for each in table if each["then"] == "right" and "withdrawn" not in each]
    answers = ((recognise_all if "kind" in each else recognise)(each["text"]) for each in right)
    assert [each["url"] for each, answer in zip(right, answers, strict=True) if not answer] == []
