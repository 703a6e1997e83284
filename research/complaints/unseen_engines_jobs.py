"""The jobs of ``unseen_engines.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_

from research.complaints.parts import GroupedExperts, Pair, TeExperts, rows, te_moe
from research.complaints.unseen_jobs import (
    Rebuilt,
    installed,
    layers_of,
    on_meta,
    processes,
    ran,
    weights_in_fp8,
)
from tests import prototypes
from tests.stand_ins import transformer_engine as te


class Block(nn.Module):
    """A block of Llama: grouped attention and a gated MLP, of one kind of Linear."""

    def __init__(
        self, kind: Any, width: int, hidden: int, heads: int, groups: int, gated: bool = True
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wo = kind(width, width, bias=False), kind(width, width, bias=False)
        self.wk, self.wv = (kind(width, groups * self.size, bias=False) for _ in range(2))
        self.w1, self.w2 = kind(width, hidden, bias=False), kind(hidden, width, bias=False)
        self.w3 = kind(width, hidden, bias=False) if gated else None

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out = self.attend(self.heads(self.wq(y)), self.heads(self.wk(y)), self.heads(self.wv(y)))
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        gate = functional.silu(self.w1(y))
        return x + self.w2(gate * self.w3(y) if self.w3 is not None else gate)


class Recomputed(nn.Module):
    """Full activation checkpointing of one block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]


SHARDED = {
    **dict.fromkeys(("block.wq", "block.wk", "block.wv", "block.w1", "block.w3"), ColwiseParallel()),
    **dict.fromkeys(("block.wo", "block.w2"), RowwiseParallel()),
}


def _rowwise(ranks: int, tensor_parallel: int) -> Rebuilt:
    """Four blocks of Llama 3 70B in rowwise FP8, sharded, compiled by block."""
    processes(ranks)
    mesh = init_device_mesh("cpu", (ranks // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))

    def make() -> nn.Module:
        return nn.Sequential(*(Recomputed(Block(nn.Linear, 8192, 28672, 64, 8)) for _ in range(4)))

    model = convert_to_float8_training(on_meta(make), config=Float8LinearConfig.from_recipe_name("rowwise"))
    for block in model:
        parallelize_module(block, mesh["tp"], SHARDED)
        block.compile()
    return Rebuilt(model, torch.empty(4, 8192, 8192, dtype=torch.bfloat16, device="meta"))


def rowwise_under_tensor_parallelism(patch: pytest.MonkeyPatch) -> Rebuilt:
    return _rowwise(128, 8)


def rowwise_with_async_tensor_parallelism(patch: pytest.MonkeyPatch) -> Rebuilt:
    patch.setattr("torch._inductor.config._micro_pipeline_tp", True)
    return _rowwise(256, 2)


def mxfp8_weights_without_gradients(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.1.0", "fp8")

    def make() -> nn.Module:
        return nn.Sequential(te.Linear(4096, 16384), te.Linear(16384, 4096), nn.Linear(4096, 4096))

    model = weights_in_fp8(ran(on_meta(make), 4096, te.MXFP8BlockScaling()))
    for layer in layers_of(model):
        layer.requires_grad_(False)
    return Rebuilt(model, rows(8192, 4096), torch.optim.AdamW(model.parameters()))


def nvfp4_experts(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.8.0", "fp8")
    model = on_meta(lambda: nn.Sequential(*(TeExperts(te.GroupedLinear, 8, 7168, 2048) for _ in range(4))))
    return Rebuilt(ran(model, 7168, te.NVFP4BlockScaling()), rows(65536, 7168))


def _te_under_fsdp2(patch: pytest.MonkeyPatch, release: str, fp8_weights: bool) -> nn.Module:
    installed(patch, release, "quantization")
    processes(8)
    model = ran(on_meta(lambda: nn.Sequential(*(Pair(te.Linear, 4096) for _ in range(8)))), 4096)
    if fp8_weights:
        weights_in_fp8(model)
    mesh = init_device_mesh("cpu", (8,))
    for block in model:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def te_under_fsdp2(patch: pytest.MonkeyPatch) -> Rebuilt:
    return Rebuilt(_te_under_fsdp2(patch, "2.15.0", fp8_weights=False), rows(8192, 4096))


class FusedAdam(torch.optim.AdamW):
    """Transformer Engine's optimizer of this name."""


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def fused_adam_under_fsdp2(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = _te_under_fsdp2(patch, "2.9.0", fp8_weights=True)
    return Rebuilt(model, rows(8192, 4096), FusedAdam(model.parameters()))


class Gpt(nn.Module):
    """A decoder with its embedding and head."""

    def __init__(self, kind: Any, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Block(kind, width, 4 * width, heads, heads, gated=False) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def gpt3_5b(patch: pytest.MonkeyPatch) -> Rebuilt:
    te_ = installed(patch, "0.7.0", "fp8")
    model = on_meta(lambda: Gpt(te_.Linear, 24, 4096, 32, 51200))
    tokens = torch.zeros(4, 2048, dtype=torch.long, device="meta")
    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        model(tokens)
    return Rebuilt(model, tokens)


def fp8_weights_under_fsdp1(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "1.2.0", "fp8")
    processes(8)
    model = weights_in_fp8(ran(nn.Sequential(*(Pair(te.Linear, 1024) for _ in range(4))).bfloat16(), 1024))
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return Rebuilt(sharded, torch.zeros(8192, 1024, dtype=torch.bfloat16))


def experts_in_grouped_gemm(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.1.0", "fp8")
    model = on_meta(lambda: nn.Sequential(*(te_moe(te.Linear, 2048, 16, 768) for _ in range(8))))
    return Rebuilt(ran(model, 2048), rows(32768, 2048))


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, as NeMo's PEFT has."""

    def __init__(self, frozen: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def frozen_base_in_eval(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "1.4.0", "fp8")

    def make() -> nn.Module:
        return nn.Sequential(*(Adapted(te.Linear(4096, 4096), 4096, 32) for _ in range(16)))

    model = ran(on_meta(make), 4096)
    for layer in layers_of(model):
        layer.eval()
    return Rebuilt(model, rows(8192, 4096))


def _mxfp8_experts(tokens: int, pad: bool) -> Rebuilt:
    """Four layers of DeepSeek-V3 16B's experts, 8 of 64 on this rank, with so many tokens each."""
    model = on_meta(lambda: nn.Sequential(*(GroupedExperts(8, 2048, 1408) for _ in range(4))))
    config = prototypes.mxfp8("MXFP8_RCEIL")
    config.pad_token_groups_for_grouped_mm = pad
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, GroupedExperts))
    for block in model:  # type: ignore[attr-defined]
        block.compile()
    return Rebuilt(model, rows(8 * tokens, 2048))


def mxfp8_groups_of_44(patch: pytest.MonkeyPatch) -> Rebuilt:
    return _mxfp8_experts(44, pad=False)


def mxfp8_padding_that_is_not_needed(patch: pytest.MonkeyPatch) -> Rebuilt:
    return _mxfp8_experts(16384, pad=True)


class FlashAttnFunc(torch.autograd.Function):
    """FlashAttention 3's function of this name; its kernels are stand-ins."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, None)


FlashAttnFunc.__module__ = "flash_attn_interface"


class Fp8Attention(Block):
    """The block with its attention in FP8."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.to(torch.float8_e4m3fn) for each in (q, k, v))
        return FlashAttnFunc.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]


def fp8_flash_attention(patch: pytest.MonkeyPatch) -> Rebuilt:
    patch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    model = on_meta(lambda: nn.Sequential(*(Fp8Attention(nn.Linear, 4096, 11008, 32, 32) for _ in range(4))))
    return Rebuilt(model, torch.empty(2, 4096, 4096, dtype=torch.bfloat16, device="meta"))


class VlmLayer(Block):
    """Gemma's layer with its MLP in one te.LayerNormMLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear, width, hidden, 8, 1)
        del self.w1, self.w2, self.w3, self.mlp_norm
        self.mlp = te.LayerNormMLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        out = self.attend(self.heads(self.wq(y)), self.heads(self.wk(y)), self.heads(self.wv(y)))
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Stack(nn.Module):
    """One of the two decoders whose layers take turns."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Pi05(nn.Module):
    """The layers of PaliGemma's language model and of the action expert, in lockstep."""

    def __init__(self) -> None:
        super().__init__()
        self.paligemma = Stack(*(VlmLayer(2048, 16384) for _ in range(18)))
        self.gemma_expert = Stack(*(Block(nn.Linear, 1024, 4096, 8, 1) for _ in range(18)))

    def forward(self, prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
        for layer in range(18):
            prefix, suffix = self.paligemma.layers[layer](prefix), self.gemma_expert.layers[layer](suffix)
        return prefix.mean() + suffix.mean()


def pi05_on_h20(patch: pytest.MonkeyPatch) -> Rebuilt:
    installed(patch, "2.15.0", "quantization")
    model = on_meta(Pi05)
    batch = tuple(
        torch.empty(32, n, w, dtype=torch.bfloat16, device="meta") for n, w in ((816, 2048), (50, 1024))
    )
    with te.autocast(enabled=True, recipe=te.DelayedScaling()):
        model(*batch)
    return Rebuilt(model, batch)


class E4m3Linear(nn.Linear):
    """Weights that are stored and trained in FP8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


def weights_cast_to_e4m3(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: nn.Sequential(*(Pair(E4m3Linear, 4096) for _ in range(8))))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn))
            layer.bias = None
    return Rebuilt(model, rows(8192, 4096), torch.optim.AdamW(model.parameters()))
