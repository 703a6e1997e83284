"""The jobs of ``unseen_last.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from research.complaints import unseen_adapters_jobs as adapters
from research.complaints.parts import mlp, rows
from research.complaints.unseen_engines_jobs import SHARDED, Block, Gpt
from research.complaints.unseen_jobs import installed, on_meta, processes, ran, weights_in_fp8
from research.complaints.unseen_mixed_jobs import Job, in_fp8, llama
from research.recipes.parts import tokens
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.packages import stand_in

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def sft_padded_to_8(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.4.0", "fp8", megatron_core="0.6.0")
    model = on_meta(lambda: nn.Sequential(*(Block(te.Linear, 8192, 3584, 64, 8) for _ in range(4))))
    batch = torch.empty(1, 1912, 8192, dtype=BF16, device="meta")
    return Job(in_fp8(model, batch), batch)


def sequence_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.8.0", "fp8", megatron_core="0.14.0")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 4096, 8)), 4096, te.Float8BlockScaling()), rows(4092, 4096))


class Esm2(nn.Module):
    """Blocks of ESM-2 and its head, which transforms and then decodes."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Block(te.Linear, width, 4 * width, width // 64, width // 64, gated=False) for _ in range(layers)
        )
        self.lm_head = nn.ModuleDict({"dense": te.Linear(width, width), "norm": nn.LayerNorm(width)})
        self.lm_head["decoder"] = te.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.lm_head["norm"](functional.gelu(self.lm_head["dense"](x)))
        return self.lm_head["decoder"](x)  # type: ignore[no-any-return]


def esm2(width: int, layers: int, vocabulary: int, recipe: Any) -> Job:
    batch = tokens(16, 1024, labels=False)
    return Job(in_fp8(on_meta(lambda: Esm2(width, layers, vocabulary)), batch, recipe), batch)


def vocabulary_of_33(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.6.0", "fp8")
    return esm2(1280, 33, 33, te.MXFP8BlockScaling())


def head_in_fp8(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.10.0", "quantization")
    return esm2(2560, 36, 64, te.Float8CurrentScaling())


def bf16_beside_fp8(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.8.0", "fp8")
    return esm2(2560, 36, 64, te.DelayedScaling())


class Layer(Block):
    """The block with its MLP in one te.LayerNormMLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(te.Linear, width, hidden, width // 128, width // 128)
        del self.w1, self.w2, self.w3, self.mlp_norm
        self.mlp = te.LayerNormMLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = self.attend(self.heads(self.wq(y)), self.heads(self.wk(y)), self.heads(self.wv(y)))
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def layer_norm_mlp(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "1.2.0", "fp8")
    batch = torch.empty(4, 4096, 4096, dtype=BF16, device="meta")
    return Job(in_fp8(on_meta(lambda: nn.Sequential(*(Layer(4096, 11008) for _ in range(8)))), batch), batch)


def krea2_fp8_scaled(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.scaled(adapters.in_blocks(model))
    return Job(adapters.Trained(model, 32, BF16), adapters.flux_batch(4096, 512), autocast=BF16)


def nvfp4_on_5090(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.15.0", "quantization")
    model = on_meta(lambda: mlp(te.Linear, 4096, 8))
    return Job(ran(model, 4096, te.NVFP4BlockScaling()), rows(8192, 4096))


def blockwise_weights(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.7.0", "fp8", megatron_core="0.14.0")
    model = on_meta(lambda: mlp(te.Linear, 4096, 8))
    return Job(weights_in_fp8(ran(model, 4096, te.Float8BlockScaling())), rows(8192, 4096))


def mxfp8_both_ways(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.1.0", "fp8")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 4096, 8)), 4096, te.MXFP8BlockScaling()), rows(8192, 4096))


def zero2_float8_all_gather(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, torchao="0.7.0")
    processes(8)
    mesh = init_device_mesh("cpu", (8,))
    model = on_meta(lambda: Gpt(nn.Linear, 32, 4096, 32, 32000))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Job(torch.compile(model), torch.zeros(1, 4096, dtype=torch.long, device="meta"))


def vocabulary_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    processes(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = convert_to_float8_training(on_meta(lambda: Gpt(nn.Linear, 2, 256, 16, 2256)))
    parallelize_module(model, mesh, {"head": ColwiseParallel()})
    plan = {name.removeprefix("block."): style for name, style in SHARDED.items()}
    for layer in model.layers:
        parallelize_module(layer, mesh, {name: plan[name] for name in ("w1", "w2")})
    return Job(model, torch.zeros(8, 2048, dtype=torch.long, device="meta"))


def float8_not_compiled(patch: pytest.MonkeyPatch) -> Job:
    processes(8)
    mesh = init_device_mesh("cpu", (8,))
    model = llama(32, 4096, 14336)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model.model.layers, config=config)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return Job(fully_shard(model, mesh=mesh), tokens(1, 4096))


def blockwise_on_cuda_12_8(patch: pytest.MonkeyPatch) -> Job:
    patch.setattr(torch.version, "cuda", "12.8")
    installed(patch, "2.8.0", "fp8", megatron_core="0.14.0")
    return Job(ran(on_meta(lambda: mlp(te.Linear, 4096, 8)), 4096, te.Float8BlockScaling()), rows(8192, 4096))


class W8A8(torch.autograd.Function):
    """OneTrainer's matmul: rows of both sides in FP8, the result in fp32, scaled afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return scaled_afterwards(x, weight.t(), scale.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return (
            scaled_afterwards(grad * scale.flatten(), weight.t().contiguous().t(), scale.mean()),
            None,
            None,
        )


def scaled_afterwards(x: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    flat, one = x.flatten(0, -2), torch.ones((), device=x.device)
    amax = flat.abs().amax(1, keepdim=True).float() / 448
    out = torch._scaled_mm((flat / amax).to(FP8), other, one, one, out_dtype=torch.float32)
    return (out * amax * scale).to(x.dtype).unflatten(0, x.shape[:-1])


class LinearW8A8(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = W8A8.apply(x, self.weight, self.weight_scale)
        return out if self.bias is None else out + self.bias  # type: ignore[no-any-return]


def scaled_after_the_matmul(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    for layer in adapters.in_blocks(model):
        layer.__class__ = LinearW8A8
        layer.register_buffer("weight_scale", torch.ones(layer.out_features, 1, device="meta"))
    adapters.stored(adapters.in_blocks(model))
    adapters.compile_blocks(model.double_blocks, model.single_blocks)
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


def lora_cast_too(patch: pytest.MonkeyPatch) -> Job:
    """diffusers' hooks on every Linear, LoRA's among them."""
    lora = adapters.layerwise_casting(patch).model
    for name, layer in lora.named_modules():
        if isinstance(layer, nn.Linear) and "lora_" in name:
            layer.to(FP8)
            layer.register_forward_pre_hook(lambda layer, _: layer.to(BF16) and None)
            layer.register_forward_hook(lambda layer, _, __: layer.to(FP8) and None)
    return Job(lora, adapters.flux_batch(1350, 226))


def automodel_not_compiled(patch: pytest.MonkeyPatch) -> Job:
    model = llama(16, 2048, 8192, vocab_size=128256)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    return Job(model, tokens(4, 4096))
