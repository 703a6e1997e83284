"""The jobs of ``unseen_adapters.toml``, rebuilt as far as a CPU can."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.optimization import Adafactor

from research.recipes import flux
from research.recipes.parts import Block as GptBlock
from research.recipes.parts import Decoder, on_meta, tokens
from tests import prototypes

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


class Rebuilt(NamedTuple):
    """What fp8doctor is given."""

    model: Any
    batch: Any = None
    optimizer: Any = None
    autocast: torch.dtype | None = None


class Flux(flux.Flux):
    """FLUX with so many blocks, checkpointed as diffusers and kohya do."""

    def __init__(self, double: int = 19, single: int = 38, checkpointing: bool = False) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(flux.DoubleBlock() for _ in range(double))
        self.single_blocks = nn.ModuleList(flux.SingleBlock() for _ in range(single))
        self.gradient_checkpointing = checkpointing

    def run(self, block: nn.Module, *given: Tensor) -> Any:
        if self.gradient_checkpointing and self.training:
            return checkpoint(block, *given, use_reentrant=False)
        return block(*given)

    def forward(self, img: Tensor, txt: Tensor, timesteps: Tensor, y: Tensor) -> Tensor:
        vec = self.time_in(timesteps) + self.vector_in(y)
        img, txt = self.img_in(img), self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = self.run(block, img, txt, vec)
        x = torch.cat((txt, img), dim=1)
        for block in self.single_blocks:
            x = self.run(block, x, vec)
        return self.final_layer(x[:, txt.shape[1] :])


def flux_batch(image: int, text: int) -> dict[str, Tensor]:
    """One sample of so many tokens."""
    sizes = {"img": (1, image, 64), "txt": (1, text, 4096), "timesteps": (1, 256), "y": (1, 768)}
    return {name: torch.empty(size, dtype=BF16, device="meta") for name, size in sizes.items()}


class WanBlock(nn.Module):
    """Self-attention, cross-attention to the caption, and an MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        for name in ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o"):
            setattr(self, name, nn.Linear(width, width))
        self.ffn = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width)
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o(attend(self.q(h), self.k(h), self.v(h)))
        x = x + self.cross_o(attend(self.cross_q(x), self.cross_k(context), self.cross_v(context)))
        return x + self.ffn(self.norm(x))


def attend(*qkv: Tensor) -> Tensor:
    queries, keys, values = (each.unflatten(-1, (-1, 128)).transpose(1, 2) for each in qkv)
    seen = nn.functional.scaled_dot_product_attention(queries, keys, values)
    return seen.transpose(1, 2).flatten(2)


class Wan(nn.Module):
    """Wan 2.1 14B: 40 blocks."""

    def __init__(self, blocks: int = 40, width: int = 5120, hidden: int = 13824) -> None:
        super().__init__()
        self.patch, self.text = nn.Linear(64, width), nn.Linear(4096, width)
        self.blocks = nn.ModuleList(WanBlock(width, hidden) for _ in range(blocks))
        self.head = nn.Linear(width, 64)
        self.gradient_checkpointing = True

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x, context = self.patch(x), self.text(context)
        for block in self.blocks:
            x = checkpoint(block, x, context, use_reentrant=False)
        return self.head(x)


def wan_batch(image: int) -> dict[str, Tensor]:
    sizes = {"x": (1, image, 64), "context": (1, 512, 4096)}
    return {name: torch.empty(size, dtype=BF16, device="meta") for name, size in sizes.items()}


def linears(model: nn.Module) -> list[nn.Linear]:
    return [each for each in model.modules() if isinstance(each, nn.Linear)]


def in_blocks(model: Flux | Wan) -> list[nn.Linear]:
    """The Linears that these trainers quantize."""
    lists = [each for each in model.children() if isinstance(each, nn.ModuleList)]
    return [linear for blocks in lists for linear in linears(blocks)]


def stored(layers: Iterable[nn.Linear]) -> None:
    """``fp8_base``: weights cast to FP8, without a scale; autocast casts them back."""
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.to(FP8), requires_grad=False)


def scaled(layers: Iterable[nn.Linear]) -> None:
    """``fp8_scaled``: musubi-tuner's forward over weights with a scale for each block of 64."""

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        weight = layer.weight.to(x.dtype).unflatten(1, (-1, 64)) * layer.scale_weight[..., None]
        return nn.functional.linear(x, weight.flatten(1), layer.bias)

    for layer in layers:
        scales = torch.ones(layer.out_features, layer.in_features // 64, dtype=BF16, device="meta")
        layer.weight = nn.Parameter(layer.weight.to(FP8), requires_grad=False)
        layer.register_buffer("scale_weight", scales)
        layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


class LoRAModule(nn.Module):
    """kohya's: it takes the place of a layer's forward, and does not hold the layer."""

    def __init__(self, layer: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_down = nn.Linear(layer.in_features, rank, bias=False, dtype=dtype)
        self.lora_up = nn.Linear(rank, layer.out_features, bias=False, dtype=dtype)
        self.org_forward = layer.forward
        layer.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        added = self.lora_up(self.lora_down(x.to(self.lora_down.weight.dtype)))
        return self.org_forward(x) + added.to(x.dtype)


class Trained(nn.Module):
    """A frozen transformer and kohya's network beside it."""

    def __init__(self, transformer: Flux | Wan, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.transformer = transformer.requires_grad_(False)
        self.network = nn.Module()
        names = {id(each): name.replace(".", "_") for name, each in transformer.named_modules()}
        with torch.device("meta"):
            for each in in_blocks(transformer):
                self.network.add_module(f"lora_unet_{names[id(each)]}", LoRAModule(each, rank, dtype))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.transformer(**batch)


def with_peft(model: nn.Module, rank: int, targets: Any, **settings: Any) -> nn.Module:
    """PEFT's LoRA, as diffusers' and transformers' scripts add it."""
    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=rank, target_modules=targets), **settings)


def suffixes(layers: Callable[[str], bool], model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and layers(name)]


def compile_blocks(*lists: nn.ModuleList) -> None:
    for block in (block for blocks in lists for block in blocks):
        block.compile()


def flux_lora_in_float8(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(Flux)
    named = suffixes(lambda name: "blocks" in name and "mod" not in name, model)
    lora = with_peft(model, 16, named, autocast_adapter_dtype=False).bfloat16()
    convert_to_float8_training(lora, module_filter_fn=lambda module, name: name.endswith("base_layer"))
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("lora_" in name)
    compile_blocks(model.double_blocks, model.single_blocks)
    return Rebuilt(lora, flux_batch(1024, 512))


def z_image_lora_in_mxfp8(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Decoder([GptBlock(3840, 30, 30, 10240) for _ in range(30)], 3840, 64))
    named = suffixes(lambda name: "layers" in name, model)
    lora = with_peft(model, 16, named, autocast_adapter_dtype=False).bfloat16()
    quantize_(
        lora,
        prototypes.mxfp8("MXFP8_RCEIL"),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and name.endswith("base_layer"),
    )
    for name, parameter in lora.named_parameters():
        parameter.requires_grad_("lora_" in name)
    compile_blocks(model.layers)
    return Rebuilt(lora, tokens(1, 4096, labels=False))


def flux_kohya_fp8_base(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Flux(checkpointing=True))
    stored(linears(model))
    return Rebuilt(Trained(model, 128), flux_batch(4096, 512), autocast=BF16)


def qwen_image_fp8_scaled(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Flux(double=60, single=0, checkpointing=True))
    scaled(in_blocks(model))
    return Rebuilt(Trained(model, 64), flux_batch(83 * 83, 256), autocast=BF16)


def hunyuan_fp8_base(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Flux(double=20, single=40, checkpointing=True))
    stored(linears(model))
    return Rebuilt(Trained(model, 32), flux_batch(27 * 32, 256), autocast=BF16)


def flux_kontext_fp8_scaled(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Flux(checkpointing=True))
    scaled(in_blocks(model))
    return Rebuilt(Trained(model, 16), flux_batch(8192, 512), autocast=BF16)


def wan_lora_in_bf16(patch: pytest.MonkeyPatch) -> Rebuilt:
    return wan_lora(1024)


def wan_at_720p(patch: pytest.MonkeyPatch) -> Rebuilt:
    return wan_lora(21 * 45 * 80)


def wan_lora(image: int) -> Rebuilt:
    model = on_meta(Wan)
    named = suffixes(lambda name: "blocks" in name, model)
    return Rebuilt(with_peft(model, 32, named, autocast_adapter_dtype=False).bfloat16(), wan_batch(image))


def wan_full_fine_tuning(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(Wan)
    return Rebuilt(model, wan_batch(1024), torch.optim.AdamW(model.parameters()))


def layerwise_casting(patch: pytest.MonkeyPatch) -> Rebuilt:
    """diffusers' hooks, with LoRA left in fp32."""

    def up(layer: nn.Module, _: Any) -> None:
        layer.to(BF16)

    def down(layer: nn.Module, _: Any, __: Any) -> None:
        layer.to(FP8)

    model = on_meta(lambda: Flux(double=42, single=0, checkpointing=True))
    named = suffixes(lambda name: "blocks" in name and "qkv" in name, model)
    lora = with_peft(model, 64, named, autocast_adapter_dtype=False)
    for name, layer in lora.named_modules():
        if isinstance(layer, nn.Linear) and "lora_" not in name and "blocks" in name:
            layer.to(FP8)
            layer.register_forward_pre_hook(up)
            layer.register_forward_hook(down)
    return Rebuilt(lora, flux_batch(1350, 226))


class Fp8Forward(torch.autograd.Function):
    """FP8 matmul with rowwise scales in the forward; the backward dequantizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        rows = x.flatten(0, -2)
        amax = rows.abs().amax(1, keepdim=True).float() / 448
        out = torch._scaled_mm((rows / amax).to(FP8), weight.t(), amax, scale.t(), out_dtype=BF16)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        return grad @ (weight.to(grad.dtype) * scale.to(grad.dtype)), None, None


class Fp8Rows(nn.Linear):
    """A frozen Linear with FP8 rows."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta", dtype=BF16)
        self.weight = nn.Parameter(base.weight.to(FP8), requires_grad=False)
        self.register_buffer("weight_scale", torch.ones(base.out_features, 1, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return Fp8Forward.apply(x, self.weight, self.weight_scale)


def fp8_forward_under_lora(patch: pytest.MonkeyPatch) -> Rebuilt:
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    )
    config.num_key_value_heads, config.head_dim, config.use_cache = 8, 128, False
    model = on_meta(lambda: Qwen3ForCausalLM(config))
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Fp8Rows(child))
    lora = with_peft(model, 32, "all-linear", autocast_adapter_dtype=False)
    for name, parameter in lora.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(BF16)
    lora.gradient_checkpointing_enable()
    return Rebuilt(lora, tokens(4, 2048))


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
}


QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}

CONFIGS = {
    "Qwen3-4B": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **QWEN3_4B},
    "Llama-3-8B": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA_8B},
}
"""Configurations that ``plan`` is asked about."""


def llama() -> LlamaForCausalLM:
    return on_meta(lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_8B)))


def llama_without_fp8(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = llama()
    model.gradient_checkpointing_enable()
    compile_blocks(model.model.layers)
    return Rebuilt(model, tokens(2, 4096), torch.optim.AdamW(model.parameters(), fused=True))


def trainer_with_bf16(patch: pytest.MonkeyPatch) -> Rebuilt:
    from accelerate import Accelerator

    patch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    Accelerator(mixed_precision="bf16", cpu=True)
    return Rebuilt(llama(), tokens(2, 2048), autocast=BF16)


def gpt2_rowwise(patch: pytest.MonkeyPatch) -> Rebuilt:
    width, depth = 1536, 24
    model = on_meta(
        lambda: Decoder([GptBlock(width, 12, 12, 4 * width, gated=False) for _ in range(depth)], width, 32768)
    )
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "layers" in name)
    return Rebuilt(torch.compile(model), tokens(32, 2048))


def float8_llama_compiled(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = convert_to_float8_training(llama(), module_filter_fn=lambda module, name: name != "lm_head")
    compile_blocks(model.model.layers)
    return Rebuilt(model, tokens(1, 4096), torch.optim.AdamW(model.parameters(), fused=True))


def flux_full_fine_tuning(patch: pytest.MonkeyPatch) -> Rebuilt:
    model = on_meta(lambda: Flux(checkpointing=True))
    optimizer = Adafactor(model.parameters(), relative_step=False, scale_parameter=False, lr=1e-5)
    return Rebuilt(model, flux_batch(4096, 512), optimizer)
