"""The jobs of ``unseen_more.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.quantization import quantize_
from transformers import T5Config, T5EncoderModel

from research.complaints import unseen_adapters_jobs as adapters
from research.complaints.parts import GroupedExperts, MoeBlock, mlp, rows
from research.complaints.unseen_engines_jobs import Block, Gpt
from research.complaints.unseen_jobs import FP8Linear, decoder, installed, on_meta, processes, ran
from research.complaints.unseen_mixed_jobs import Job, in_fp8, llama
from research.recipes.parts import Block as GptBlock
from research.recipes.parts import Decoder, tokens
from tests import prototypes
from tests.stand_ins import transformer_engine as te
from tests.stand_ins.packages import stand_in

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def packed_rows_in_mxfp8(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.13.0", "quantization", megatron_core="0.17.0")
    model = on_meta(lambda: mlp(te.Linear, 3072, 8))
    return Job(in_fp8(model, rows(2048, 3072), te.MXFP8BlockScaling()), rows(7984, 3072))


def experts_after_the_linears(patch: pytest.MonkeyPatch) -> Job:
    """As torchao of the time left it: quantize_ unwrapped each Float8Linear that it passed."""
    model = on_meta(lambda: nn.Sequential(*(MoeBlock(5120, 2, 8192) for _ in range(2))))
    quantize_(model, prototypes.float8(), filter_fn=lambda module, name: isinstance(module, GroupedExperts))
    for block in model:
        block.compile()
    return Job(model, rows(32768, 5120))


def compiled_before_prepare(patch: pytest.MonkeyPatch) -> Job:
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(torch.cuda, "is_available", lambda: True)
        machine.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        patch.setenv("ACCELERATE_FP8_BACKEND", "AO")
        Accelerator(mixed_precision="fp8", cpu=True)
    model = llama()
    for parameter in model.parameters():  # it has trained
        parameter.grad = torch.empty_like(parameter)
    return Job(torch.compile(model), tokens(4, 2048), autocast=BF16)


class BlockwiseMatmul(torch.autograd.Function):
    """torchao's function of this kind; its Triton kernels are stand-ins with their dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = x.to(FP8), weight.to(FP8)
        ctx.save_for_backward(x, weight)
        return x8.to(x.dtype) @ weight8.to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).t()
        return grad @ weight, rows @ x.flatten(0, -2)


class Float8BlockwiseLinear(nn.Linear):
    block_size, use_triton = 128, True

    def forward(self, x: Tensor) -> Tensor:
        return BlockwiseMatmul.apply(x, self.weight)  # type: ignore[no-any-return]


Float8BlockwiseLinear.__module__ = "torchao.prototype.blockwise_fp8_training.linear"


def blocks_in_triton(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(
        lambda: nn.Sequential(*(Block(Float8BlockwiseLinear, 4096, 14336, 32, 8) for _ in range(4)))
    )
    for block in model:
        block.compile()
    return Job(model, torch.empty(2, 8192, 4096, dtype=BF16, device="meta"))


def mlp_of_768(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: Decoder((GptBlock(768, 6, 6, 3072, gated=False) for _ in range(12)), 768, 50304))
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name.endswith(("w1", "w2"))
    )
    return Job(torch.compile(model), tokens(24, 2048))


class VitBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = te.Linear(width, 3 * width), te.Linear(width, width)
        self.fc1, self.fc2 = te.Linear(width, 4 * width), te.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(adapters.attend(*self.qkv(self.norm(x)).chunk(3, dim=-1)))
        return x + self.fc2(functional.gelu(self.fc1(self.mlp_norm(x))))


class Vit(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(VitBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2)).mean(1))  # type: ignore[no-any-return]


def vit_in_te(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "0.9.0", "fp8")
    with torch.device("meta"):
        model, batch = Vit(1024, 24), torch.empty(64, 3, 224, 224)
    return Job(in_fp8(model, batch), batch)


class SpatialTransformer(nn.Module):
    """Attention over the pixels and to the caption, and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_q, self.to_out, self.cross_q, self.cross_out = (nn.Linear(width, width) for _ in range(4))
        self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(width, width)
        self.cross_k, self.cross_v = nn.Linear(2048, width), nn.Linear(2048, width)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.to_out(adapters.attend(self.to_q(y), self.to_k(y), self.to_v(y)))
        x = x + self.cross_out(adapters.attend(self.cross_q(x), self.cross_k(text), self.cross_v(text)))
        value, gate = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(value * functional.gelu(gate))


class Level(nn.Module):
    """Two convolutions and so many transformers."""

    def __init__(self, wide: int, width: int, depth: int, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, wide)
        self.conv1, self.conv2 = nn.Conv2d(wide, width, 3, stride, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.transformers = nn.ModuleList(SpatialTransformer(width) for _ in range(depth))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = self.conv2(functional.silu(self.conv1(functional.silu(self.norm(x)))))
        y = x.flatten(2).transpose(1, 2)
        for each in self.transformers:
            y = each(y, text)
        return y.transpose(1, 2).unflatten(2, x.shape[2:])


class Unet(nn.Module):
    """SDXL's levels, without the up path's skips."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, 320, 3, 1, 1), nn.Conv2d(640, 4, 3, 1, 1)
        self.down = nn.ModuleList([Level(320, 320, 0), Level(320, 640, 4, 2), Level(640, 1280, 20, 2)])
        self.up = nn.ModuleList([Level(1280, 1280, 30), Level(1280, 640, 6)])

    def forward(self, img: Tensor, txt: Tensor) -> Tensor:
        x = self.conv_in(img)
        for level in (*self.down, *self.up):
            x = level(x, txt)
        return self.conv_out(x)  # type: ignore[no-any-return]


def sdxl_stored(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(Unet).to(FP8)
    batch = {
        "img": torch.empty(1, 4, 128, 128, dtype=BF16, device="meta"),
        "txt": torch.empty(1, 77, 2048, dtype=BF16, device="meta"),
    }
    return Job(adapters.Trained(model, 32), batch, autocast=BF16)


class TransolverBlock(nn.Module):
    """Attention among the slices that the points of a mesh are gathered in, and an MLP."""

    def __init__(self, width: int, heads: int, slices: int) -> None:
        super().__init__()
        self.heads, size = heads, width // heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.in_x, self.in_fx, self.out = (te.Linear(width, width) for _ in range(3))
        self.slice = nn.Linear(size, slices)
        self.to_q, self.to_k, self.to_v = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.fc1, self.fc2 = te.Linear(width, 2 * width), te.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        fx, mid = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.in_fx, self.in_x)
        )
        weights = self.slice(mid).softmax(-1)
        token = weights.transpose(-1, -2) @ fx
        seen = functional.scaled_dot_product_attention(self.to_q(token), self.to_k(token), self.to_v(token))
        x = x + self.out((weights @ seen).transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.mlp_norm(x))))


def transolver(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.5.0", "fp8")
    model = on_meta(lambda: nn.Sequential(*(TransolverBlock(256, 8, 128) for _ in range(20))))
    batch = torch.empty(1, 200_000, 256, dtype=BF16, device="meta")
    return Job(in_fp8(model, batch), batch)


def compiled_storage_on_ampere(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.scaled(adapters.in_blocks(model))
    adapters.compile_blocks(model.double_blocks, model.single_blocks)
    return Job(adapters.Trained(model, 16, BF16), adapters.flux_batch(1024, 512), autocast=BF16)


def msamp(patch: pytest.MonkeyPatch) -> None:
    for name in ("msamp", "msamp.nn", "msamp.nn.linear"):
        patch.setitem(sys.modules, name, ModuleType(name))


def mnist_in_msamp(patch: pytest.MonkeyPatch) -> Job:
    msamp(patch)
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.MaxPool2d(2),
            nn.Flatten(),
            FP8Linear(9216, 128),
            nn.ReLU(),
            FP8Linear(128, 10),
        )
    return Job(model, torch.empty(64, 1, 28, 28, device="meta"))


def gpt_in_msamp(patch: pytest.MonkeyPatch) -> Job:
    msamp(patch)
    model = on_meta(lambda: Gpt(FP8Linear, 24, 2304, 18, 50304))
    return Job(model, torch.zeros(4, 2048, dtype=torch.long).to("meta"))


def disabled_under_autocast(patch: pytest.MonkeyPatch) -> Job:
    config = Float8LinearConfig(
        cast_config_weight_for_grad_input=CastConfig(scaling_type=ScalingType.DISABLED),
        cast_config_grad_output=CastConfig(scaling_type=ScalingType.DISABLED),
        cast_config_grad_output_for_grad_weight=CastConfig(),
    )
    with torch.device("meta"):
        model = convert_to_float8_training(mlp(nn.Linear, 4096, 8), config=config)
    for block in model:
        block.compile()
    return Job(model, torch.empty(8192, 4096, device="meta"), autocast=BF16)


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class SparseMoe(nn.Module):
    """Mixtral's, as transformers 4 has it: each expert takes the tokens that were routed to it."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for at, expert in enumerate(self.experts):
            token, place = torch.where(chosen == at)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


def mixtral_of_linears(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(*(SparseMoe(4096, 14336, 8) for _ in range(2))))
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "gate" not in name)
    return Job(torch.compile(model), torch.empty(2, 2048, 4096, dtype=BF16, device="meta"))


def weights_kept_for_the_backward(patch: pytest.MonkeyPatch) -> Job:
    stand_in(patch, torchao="0.8.0")
    processes(8)
    mesh = init_device_mesh("cpu", (8,))
    model = on_meta(lambda: nn.Sequential(*(Block(nn.Linear, 4096, 14336, 32, 8) for _ in range(32))))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    for block in model:
        block.compile()
        fully_shard(block, mesh=mesh)
    return Job(fully_shard(model, mesh=mesh), torch.empty(1, 8192, 4096, dtype=BF16, device="meta"))


class HeadMatmul(torch.autograd.Function):
    """The speedrun's operator: constant scales, and FP8 in the backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, weight8 = x.div(2).to(FP8), weight.div(2**-5).to(FP8)
        ctx.save_for_backward(x8, weight8)
        one = x.new_ones((), dtype=torch.float32)
        return torch._scaled_mm(x8, weight8.t(), one * 2, one * 2**-5, out_dtype=BF16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        grad8, one = grad.to(torch.float8_e5m2), grad.new_ones((), dtype=torch.float32)
        of_x = torch._scaled_mm(grad8, weight8.t().contiguous().t(), one, one, out_dtype=BF16)
        return of_x, torch._scaled_mm(
            grad8.t().contiguous(), x8.t().contiguous().t(), one, one, out_dtype=BF16
        )


class CastedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return HeadMatmul.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def fp8_head_on_ampere(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: Decoder((GptBlock(768, 6, 6, 3072, gated=False) for _ in range(12)), 768, 50304))
    model.lm_head = CastedLinear(768, 50304, bias=False, device="meta", dtype=BF16)
    return Job(torch.compile(model), tokens(24, 2048))


class Captioned(nn.Module):
    """FLUX with its T5 encoder in one step."""

    def __init__(self, text: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.text, self.trained = text.requires_grad_(False), trained

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Tensor:
        return self.trained(txt=self.text(input_ids).last_hidden_state, **batch)  # type: ignore[no-any-return]


def t5_with_fp8_embedding(patch: pytest.MonkeyPatch) -> Job:
    config = T5Config(
        d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, feed_forward_proj="gated-gelu"
    )
    text = on_meta(lambda: T5EncoderModel(config)).to(FP8)
    flux = on_meta(lambda: adapters.Flux(checkpointing=True))
    adapters.stored(adapters.linears(flux))
    batch = adapters.flux_batch(1024, 512) | tokens(1, 512, labels=False)
    del batch["txt"]
    return Job(Captioned(text, adapters.Trained(flux, 16, BF16)), batch, autocast=BF16)


def wqkv_of_a_rank(patch: pytest.MonkeyPatch) -> Job:
    model = on_meta(lambda: nn.Sequential(nn.Linear(8192, 1280, bias=False)))
    convert_to_float8_training(model)
    return Job(torch.compile(model), rows(16384, 8192).requires_grad_())


def bf16_weights_in_megatron(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.9.0", "quantization", megatron_core="0.15.0")
    return Job(ran(decoder(), 4096, te.MXFP8BlockScaling()), rows(8192, 4096))


def block_scaling_of_old_te_on_blackwell(patch: pytest.MonkeyPatch) -> Job:
    installed(patch, "2.6.0", "fp8")
    return Job(ran(decoder(), 4096, te.Float8BlockScaling()), rows(8192, 4096))
