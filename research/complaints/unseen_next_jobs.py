"""The jobs of ``unseen_next.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from research.complaints import unseen_adapters_jobs as adapters
from research.complaints.parts import TeExperts, rows
from research.complaints.unseen_engines_jobs import Block, Gpt
from research.complaints.unseen_jobs import installed, on_meta, processes
from research.complaints.unseen_mixed_jobs import Job, float8, in_fp8, llama
from research.recipes.parts import tokens
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.packages import stand_in

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def kept_head(_: nn.Module, name: str) -> bool:
    return name not in ("head", "lm_head")


def rowwise_llama(patch: pytest.MonkeyPatch) -> Job:
    return Job(float8(llama(8, 4096, 14336), kept_head, "rowwise"), tokens(1, 8192))


def nanochat_rowwise(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: Gpt(nn.Linear, 24, 1536, 12, 32768))
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, module_filter_fn=kept_head, config=config)
    return Job(torch.compile(model), torch.zeros(16, 2048, dtype=torch.long, device="meta"))


def rowwise_in_fp32(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, torchao="0.8.0")
    model = llama(8, 4096, 14336, vocab_size=128256).float()
    return Job(float8(model, kept_head, "rowwise"), tokens(1, 8192))


def fp8_in_accelerate_config_only(patch: pytest.MonkeyPatch) -> Job:
    patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    Accelerator(mixed_precision="bf16", cpu=True)
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    return Job(adapters.Trained(model, 32, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


class BothInFp8(torch.autograd.Function):
    """ComfyUI's: input and gradient are quantized in front of each product, without a compiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return quantized_mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return quantized_mm(grad, weight.t().contiguous().t()), None


def quantized_mm(x: Tensor, other: Tensor) -> Tensor:
    flat, one = x.flatten(0, -2), torch.ones((), device=x.device)
    scale = flat.abs().amax().float() / 448
    out = torch._scaled_mm((flat / scale).to(FP8), other, scale, one, out_dtype=x.dtype)
    return out.unflatten(0, x.shape[:-1])


class QuantizedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = BothInFp8.apply(input, self.weight)
        return out if self.bias is None else out + self.bias  # type: ignore[no-any-return]


def fp8_backward_in_eager(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    model.double_blocks, model.single_blocks = model.double_blocks[:2], model.single_blocks[:4]
    for layer in adapters.in_blocks(model):
        layer.__class__ = QuantizedLinear
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


def experts(
    patch: pytest.MonkeyPatch, release: str, count: int, width: int, hidden: int, tokens: int, layers: int
) -> Job:
    installed(patch, release, "quantization", megatron_core="0.17.0")
    model = on_meta(
        lambda: nn.Sequential(*(TeExperts(te.GroupedLinear, count, width, hidden) for _ in range(layers)))
    )
    with te.autocast(enabled=True, recipe=te.MXFP8BlockScaling()):
        model(rows(count * 32, width))
    return Job(model, rows(tokens, width))


def experts_of_50_rows(patch: pytest.MonkeyPatch) -> Job:
    return experts(patch, "2.13.0", 2, 2048, 1408, 100, 4)


def rows_of_8352_in_torch_2_4(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, torchao="0.7.0")
    model = float8(llama(4, 4096, 14336), kept_head, "rowwise")
    patch.setattr(torch, "__version__", "2.4.0+cu124")
    return Job(model, tokens(1, 8352))


def mxfp8_qwen3_experts(patch: pytest.MonkeyPatch) -> Job:
    """16 of 128 experts on a rank, each with an eighth of 8 tokens for every one of 8,192."""
    return experts(patch, "2.13.0", 16, 2048, 768, 65536, 12)


def torch_checkpoint_around_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.3.0", "fp8")
    processes(8)
    mesh = init_device_mesh("cpu", (8,))
    model = on_meta(
        lambda: nn.Sequential(*(Block(te.Linear, 4096, 16384, 32, 32, gated=False) for _ in range(8)))
    )
    batch = torch.empty(1, 2048, 4096, dtype=BF16, device="meta")
    in_fp8(model, batch)
    for i, block in enumerate(model):  # type: ignore[arg-type]
        model[i] = fully_shard(checkpoint_wrapper(block), mesh=mesh)  # type: ignore[index,operator]
    return Job(fully_shard(model, mesh=mesh), batch)


class Qwen3Layer(Block):
    """A layer of Qwen3-30B-A3B with the 16 experts of one of 8 ranks."""

    def __init__(self) -> None:
        super().__init__(te.Linear, 2048, 2048, 16, 2)
        del self.w1, self.w2, self.w3
        self.experts = TeExperts(te.GroupedLinear, 16, 2048, 768)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = self.attend(self.heads(self.wq(y)), self.heads(self.wk(y)), self.heads(self.wv(y)))
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x).flatten(0, 1)
        return x + self.experts(y.repeat(8, 1))[: len(y)].view_as(x)  # type: ignore[no-any-return]


def qwen3_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization", megatron_core="0.17.0")
    model = on_meta(lambda: Gpt(nn.Linear, 0, 2048, 16, 151936))
    model.layers.extend(on_meta(Qwen3Layer) for _ in range(48))
    batch = torch.zeros(8, 4096, dtype=torch.long, device="meta")
    return Job(in_fp8(model, batch, te.MXFP8BlockScaling()), batch)


class BlockScaled(nn.Linear):
    """kohya's with --fp8_scaled: blocks of 64 inputs have a scale each."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.to(input.dtype).unflatten(1, (-1, 64)) * self.scale_weight
        return nn.functional.linear(input, weight.flatten(1), self.bias)


def flux_fp8_scaled_in_blocks(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    for layer in adapters.in_blocks(model):
        layer.__class__ = BlockScaled
        shape = (layer.out_features, layer.in_features // 64, 1)
        layer.register_buffer("scale_weight", torch.empty(shape, dtype=BF16, device="meta"))
    adapters.stored(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


def attention_in_fp8(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.8.0", "fp8", megatron_core="0.14.0")
    processes(8)
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 4096, 14336, 32, 8) for _ in range(8))))
    batch = torch.empty(1, 8192, 4096, dtype=BF16, device="meta")
    recipe = te.Float8CurrentScaling()
    vars(recipe).update(fp8_dpa=True)
    return Job(in_fp8(model, batch, recipe), batch)
