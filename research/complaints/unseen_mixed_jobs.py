"""The jobs of ``unseen_mixed.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.utils.ao import filter_first_and_last_linear_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from research.complaints import unseen_adapters_jobs as adapters
from research.complaints.parts import MoeBlock, mlp, rows
from research.complaints.unseen_engines_jobs import SHARDED, Block, Gpt
from research.complaints.unseen_jobs import installed, on_meta, processes, ran
from research.recipes.parts import tokens
from tests import prototypes
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.packages import stand_in

BF16 = torch.bfloat16


class Job(NamedTuple):
    """What fp8doctor is given."""

    model: Any
    batch: Any = None
    autocast: torch.dtype | None = None
    accumulate: int = 1


def llama(layers: int = 16, width: int = 2048, hidden: int = 8192, **more: Any) -> LlamaForCausalLM:
    settings = {"num_attention_heads": width // 128, "num_key_value_heads": 8, "use_cache": False} | more
    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, **settings)
    return on_meta(lambda: LlamaForCausalLM(config))


def float8(
    model: nn.Module, keep: Callable[[nn.Module, str], bool], recipe: str = "tensorwise", **more: Any
) -> Any:
    """The model with torchao's Linears, its blocks compiled."""
    config = Float8LinearConfig(**more) if more else Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, module_filter_fn=keep, config=config)
    adapters.compile_blocks(model.model.layers)
    return model


def in_fp8(model: nn.Module, batch: Any, recipe: Any = None) -> nn.Module:
    with te.autocast(enabled=True, recipe=recipe or te.DelayedScaling()):
        model(**batch) if isinstance(batch, dict) else model(batch)
    return model


def te_linears(model: nn.Module) -> None:
    """Put te.Linear in the place of every Linear, as Accelerate does."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(
                    parent, name, te.Linear(child.in_features, child.out_features, child.bias is not None)
                )


def bert() -> BertForSequenceClassification:
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(attn_implementation="sdpa"))
        te_linears(model)
    return model


def nan_over_float8_rows(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, unsloth="2025.11.3")
    patch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    patch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda *_: None)
    model = llama(4)
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
    quantize_(model.model.layers, config)
    lora = adapters.with_peft(model, 32, "all-linear", autocast_adapter_dtype=False)
    return Job(lora, tokens(4, 2048))


def mxfp8_on_dense_layers_only(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(*(MoeBlock(5120, 2, 8192) for _ in range(2))))
    config = prototypes.mxfp8("MXFP8_RCEIL")
    quantize_(
        model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and "router" not in name
    )
    for block in model:
        block.compile()
    return Job(model, rows(32768, 5120))


def stored_without_checkpointing(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(adapters.Flux)
    adapters.scaled(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 32), adapters.flux_batch(1024, 256), autocast=BF16)


def block_scaling_on_blackwell(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization")
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 4096, 16384, 32, 32) for _ in range(4))))
    batch = torch.empty(31, 512, 4096, dtype=BF16, device="meta")
    return Job(in_fp8(model, batch, te.Float8BlockScaling()), batch)


def fp32_around_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.5.0", "fp8")
    model, batch = bert(), tokens(16, 128, labels=False)
    model.classifier = nn.Linear(768, 2, device="meta")
    return Job(in_fp8(model, batch), batch)


def first_and_last_in_float8(patch: pytest.MonkeyPatch) -> Job:
    return Job(float8(llama(), filter_first_and_last_linear_layers), tokens(4, 4096))


def head_of_two_classes(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.6.0", "fp8")
    batch = tokens(16, 128, labels=False)
    return Job(in_fp8(bert(), batch), batch, autocast=BF16)


def float8_in_onetrainer(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


def mpt_3b(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.9.0", "fp8")
    model, batch = (
        on_meta(lambda: Gpt(te.Linear, 32, 2560, 20, 50368)),
        torch.zeros(4, 2048, dtype=torch.long).to("meta"),
    )
    return Job(in_fp8(model, batch), batch)


def micro_batches_in_mcore(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.1.0", "fp8", megatron_core="0.4.0")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 4096, 8)), 4096), rows(2048, 4096), accumulate=8)


class Dequantized(torch.autograd.Function):
    """quanto's product: the weight is dequantized inside, and no copy of it is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return nn.functional.linear(x, weight.to(x.dtype) * scale, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        return grad @ (weight.to(grad.dtype) * scale), None, None, None


class QLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Dequantized.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-any-return]


def every_block_checkpointed(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    for each in adapters.in_blocks(model):
        each.__class__ = QLinear
        each.register_buffer("scale", torch.empty(each.out_features, 1, dtype=BF16, device="meta"))
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 1, BF16), adapters.flux_batch(4096, 512), autocast=BF16)


def fp8_in_the_configuration(patch: pytest.MonkeyPatch) -> Job:
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, use_cache=False)
    config.quantization_config = FineGrainedFP8Config()
    with torch.device("meta"):
        return Job(AutoModelForCausalLM.from_config(config), tokens(4, 2048))


def packed_rows_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization", megatron_core="0.17.0")
    model = on_meta(lambda: mlp(te.Linear, 2048, 8))
    return Job(in_fp8(model, rows(2048, 2048), te.Float8BlockScaling()), rows(2044, 2048))


def nan_under_tensor_parallelism(patch: pytest.MonkeyPatch) -> Job:
    processes(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = on_meta(lambda: nn.Sequential(*(Block(nn.Linear, 2048, 6144, 32, 4) for _ in range(4))))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
    names = {name.removeprefix("block."): type(style) for name, style in SHARDED.items()}
    plan = {
        n: ColwiseParallel(use_local_output=False) if s is ColwiseParallel else RowwiseParallel()
        for n, s in names.items()
    }
    for block in model:
        parallelize_module(block, mesh["tp"], {n: s for n, s in plan.items() if n in ("w1", "w3", "w2")})
        block.compile()
    return Job(model, torch.empty(2, 4096, 2048, dtype=BF16, device="meta"))


def emulated(patch: pytest.MonkeyPatch) -> Job:
    return Job(float8(llama(), lambda module, name: name != "lm_head", emulate=True), tokens(1, 8192))


def float8_on_ampere(patch: pytest.MonkeyPatch) -> Job:
    return Job(
        convert_to_float8_training(llama(4), module_filter_fn=lambda module, name: name != "lm_head"),
        tokens(1, 1024),
    )


class Autocasting(nn.Module):
    """A block that opens an autocast of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        recipe = te.DelayedScaling()
        vars(recipe).update(reduce_amax=True)  # the library's default
        with te.autocast(enabled=True, recipe=recipe):
            return self.block(x)  # type: ignore[no-any-return]


def autocast_for_each_layer(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.6.0", "fp8")
    processes(64)
    model = on_meta(
        lambda: nn.Sequential(*(Autocasting(Block(te.Linear, 4096, 16384, 32, 32)) for _ in range(8)))
    )
    batch = torch.empty(4, 2048, 4096, dtype=BF16, device="meta")
    model(batch)
    return Job(model, batch)


class ConvBlock(Block):
    """The block with convolutions over the sequence before it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(te.Linear, width, hidden, width // 64, width // 64)
        self.conv1, self.conv2 = (nn.Conv1d(width, width, 9, padding=4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.conv1(x.transpose(1, 2)))
        return super().forward(x + self.conv2(y).transpose(1, 2))


def convolutions_among_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.12.0", "fp8")
    batch = torch.empty(16, 1024, 1024, dtype=BF16, device="meta")
    return Job(
        in_fp8(on_meta(lambda: nn.Sequential(*(ConvBlock(1024, 4096) for _ in range(12)))), batch), batch
    )


def lora_on_an_fp8_checkpoint(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, transformers="5.2.0")
    base = llama(4, 3072, 9216)
    with torch.device("meta"):
        base = replace_with_fp8_linear(
            base, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config()
        )
    return Job(
        adapters.with_peft(base, 16, ["q_proj", "v_proj"], autocast_adapter_dtype=False), tokens(4, 2048)
    )


def rowwise_on_l4(patch: pytest.MonkeyPatch) -> Job:
    model = float8(llama(4), lambda module, name: name != "lm_head", "rowwise")
    patch.setattr(torch, "__version__", "2.5.1+cu124")
    return Job(model, tokens(1, 4096))


def flux_in_float16(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True)).half()
    adapters.stored(adapters.linears(model))
    batch = {name: each.half() for name, each in adapters.flux_batch(1024, 512).items()}
    return Job(adapters.Trained(model, 64), batch, autocast=torch.float16)


def filter_that_matches_nothing(patch: pytest.MonkeyPatch) -> Job:
    model = llama(4, 4096, 14336, vocab_size=128256)
    return Job(float8(model, lambda module, name: name != "output", "rowwise"), tokens(1, 8192))
