"""Recipes that train in FP8 through torchao, or through nanochat's FP8 Linear."""

from __future__ import annotations

import torch
from accelerate.utils.ao import convert_model_to_fp8_ao
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from research.complaints.parts import GroupedExperts
from research.recipes import flux
from research.recipes.parts import (
    Block,
    Decoder,
    Recipe,
    checkpointed,
    compiled,
    on_meta,
    sides_of_16,
    tokens,
)
from tests import prototypes
from tests.stand_ins.nanochat import Float8Linear
from tests.stand_ins.nanochat import convert_to_float8_training as to_nanochat

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    use_cache=False,
)
LLAMA_3B = LlamaConfig(
    vocab_size=128256,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    use_cache=False,
)


def titan_llama(width: int, layers: int, heads: int, hidden: int) -> Decoder:
    """torchtitan's Llama 3, with eight heads of keys and values."""
    blocks = (Block(width, heads, 8, hidden) for _ in range(layers))
    return Decoder(blocks, width, vocabulary=128256)


class TokenDispatcher:
    """torchtitan's, which pads the rows of each expert; here each expert gets as many."""

    def __init__(self, chosen: int) -> None:
        self.chosen, self.pad_multiple = chosen, 16

    def dispatch(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.chosen, 0)

    def combine(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.chosen)).sum(1)


class Float8GroupedExperts(GroupedExperts):
    """torchtitan's experts, which say by a configuration of their own that their GEMMs are FP8."""

    def __init__(self, experts: int, width: int, hidden: int, chosen: int) -> None:
        super().__init__(experts, width, hidden)
        self.token_dispatcher, self._float8_op_config = TokenDispatcher(chosen), prototypes.float8()

    def forward(self, x: Tensor, *routing: Tensor) -> Tensor:
        return self.token_dispatcher.combine(super().forward(self.token_dispatcher.dispatch(x)))


def titan_deepseek_671b() -> nn.Module:
    config = DeepseekV3Config(use_cache=False)
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config).bfloat16()
        for layer in model.model.layers[config.first_k_dense_replace :]:
            layer.mlp.experts = Float8GroupedExperts(
                config.n_routed_experts,
                config.hidden_size,
                config.moe_intermediate_size,
                config.num_experts_per_tok,
            ).bfloat16()
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        model, config=rowwise, module_filter_fn=lambda module, name: sides_of_16(module) and name != "lm_head"
    )
    checkpointed(model.model.layers, selective=True)
    return model


def to_mxfp8(model: nn.Module) -> None:
    """Swap every Linear, as torchtitan's converter does, for torchao's layer, which adds the bias itself."""
    kind = prototypes.module("mxfp8_linear").MXFP8Linear
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                sizes = child.in_features, child.out_features, child.bias is not None
                setattr(parent, name, kind(*sizes, device="meta", dtype=child.weight.dtype))


def titan_flux_schnell() -> nn.Module:
    model = on_meta(flux.Flux)
    to_mxfp8(model)
    for blocks in (model.double_blocks, model.single_blocks):
        checkpointed(blocks)
        compiled(blocks)
    return model


def titan_llama_8b() -> nn.Module:
    model = on_meta(lambda: titan_llama(4096, 32, 32, 14336))
    to_mxfp8(model)
    checkpointed(model.layers, selective=True)
    compiled(model.layers)
    return model


def titan_llama_405b() -> nn.Module:
    model = on_meta(lambda: titan_llama(16384, 126, 128, 53248))
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        model, config=rowwise, module_filter_fn=lambda module, name: sides_of_16(module) and name != "lm_head"
    )
    checkpointed(model.layers)
    compiled(model.layers)
    return model


class CastLinear(nn.Linear):
    """nanochat's Linear: a master weight in fp32, cast to what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


def nanochat_d24() -> nn.Module:
    width = 24 * 64
    with torch.device("meta"):
        model = Decoder(
            (Block(width, 12, 12, 4 * width, gated=False, linear=Float8Linear) for _ in range(24)),
            width,
            vocabulary=32768,
            linear=Float8Linear,
        )
        model.smear_gate = CastLinear(24, 1, bias=False)
        model.tok_embeddings.bfloat16()
    return torch.compile(model, dynamic=False)


def axolotl_3b() -> nn.Module:
    model = on_meta(lambda: LlamaForCausalLM(LLAMA_3B))
    convert_model_to_fp8_ao(model, config=Float8LinearConfig())
    return torch.compile(model)


def llama_factory_8b() -> nn.Module:
    model = on_meta(lambda: LlamaForCausalLM(LLAMA_8B))
    convert_model_to_fp8_ao(model)
    model.gradient_checkpointing_enable()  # LLaMA-Factory's default
    return model


def accelerate_bert() -> nn.Module:
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(vocab_size=28996))
    convert_model_to_fp8_ao(model)
    return model


def accelerate_llama_8b() -> nn.Module:
    model = on_meta(lambda: LlamaForCausalLM(LLAMA_8B))
    convert_model_to_fp8_ao(model, config=Float8LinearConfig())
    for layer in model.model.layers:
        layer.compile()
    return model


def lightning_transformer() -> nn.Module:
    from lightning.pytorch.demos import Transformer

    model = on_meta(lambda: Transformer(33278, ninp=1024, nhead=32, nhid=4096, nlayers=16))
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(pad_inner_dim=True),
        module_filter_fn=lambda module, name: name != "decoder",
    )
    return torch.compile(model)


def torchao_example() -> nn.Module:
    model = on_meta(
        lambda: nn.Sequential(nn.Linear(8192, 4096, bias=False), nn.Linear(4096, 128, bias=False))
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: sides_of_16(module) and name != "1"
    )
    return torch.compile(model)


def pairs(batch: int, length: int) -> dict[str, Tensor]:
    return {"inputs": tokens(batch, length)["input_ids"], "target": tokens(batch, length)["input_ids"]}


BERT_BATCH = {**tokens(16, 48, labels=False), "labels": torch.zeros(16, dtype=torch.long, device="meta")}
TITAN = "pytorch/torchtitan/torchtitan/models"


def picollm_d24() -> nn.Module:
    model = on_meta(lambda: Decoder((Block(1536, 12, 12, 6144, gated=False) for _ in range(24)), 1536, 32768))
    return torch.compile(to_nanochat(model), dynamic=False)  # type: ignore[return-value]


def flux_lora() -> nn.Module:
    """The base is converted first; its adapters are fp32, and nothing is compiled."""
    model = on_meta(flux.Flux).requires_grad_(False)
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda module, name: name != "final_layer" and sides_of_16(module),
    )
    targets = LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["qkv", "proj"])
    inject_adapter_in_model(targets, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def one_image() -> dict[str, Tensor]:
    """One image of 512 x 512, and its caption."""
    sizes = {"img": (1024, 64), "txt": (512, 4096), "timesteps": (256,), "y": (768,)}
    return {name: torch.empty(1, *size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()}


RECIPES = (
    Recipe(
        "torchtitan-deepseek-v3-671b-float8",
        f"{TITAN}/deepseek_v3/config_registry.py",
        titan_deepseek_671b,
        lambda: tokens(4, 4096),
        stand_in="Hugging Face's DeepSeek-V3 with torchtitan's experts; all 256 experts on one rank",
    ),
    Recipe(
        "torchtitan-flux-schnell-mxfp8",
        f"{TITAN}/flux/config_registry.py",
        titan_flux_schnell,
        flux.batch,
        gpu="B200",
    ),
    Recipe(
        "torchtitan-llama3-8b-mxfp8",
        f"{TITAN}/llama3/config_registry.py",
        titan_llama_8b,
        lambda: tokens(1, 8192, labels=False),
        gpu="B200",
    ),
    Recipe(
        "torchtitan-llama3-405b",
        f"{TITAN}/llama3/config_registry.py",
        titan_llama_405b,
        lambda: tokens(2, 8192, labels=False),
        stand_in="the whole layers for their eighths on eight tensor-parallel ranks",
    ),
    Recipe(
        "nanochat-speedrun-d24",
        "karpathy/nanochat/runs/speedrun.sh",
        nanochat_d24,
        lambda: tokens(16, 2048, labels=False),
        stand_in="a block without value embeddings; FP8 Linear after nanochat's own",
    ),
    Recipe(
        "axolotl-llama-3b-fp8",
        "axolotl-ai-cloud/axolotl/examples/llama-3/3b-fp8-fsdp2.yaml",
        axolotl_3b,
        lambda: tokens(16, 512),
        environment={"ACCELERATE_MIXED_PRECISION": "fp8"},
    ),
    Recipe(
        "llama-factory-llama3-8b-fp8-fsdp",
        "hiyouga/LLaMA-Factory/examples/extras/fp8/llama3_fp8_fsdp_sft.yaml",
        llama_factory_8b,
        lambda: tokens(1, 1024),
        environment={"ACCELERATE_MIXED_PRECISION": "fp8", "FP8_BACKEND": "torchao"},
    ),
    Recipe(
        "accelerate-bert-torchao",
        "huggingface/accelerate/benchmarks/fp8/torchao/non_distributed.py",
        accelerate_bert,
        lambda: BERT_BATCH,
        autocast=torch.bfloat16,
    ),
    Recipe(
        "accelerate-llama-8b-fsdp2",
        "huggingface/accelerate/examples/torch_native_parallelism/fsdp2_fp8.py",
        accelerate_llama_8b,
        lambda: tokens(1, 8192),
    ),
    Recipe(
        "lightning-fabric-transformer",
        "Lightning-AI/pytorch-lightning/examples/fabric/fp8_distributed_transformer/train.py",
        lightning_transformer,
        lambda: pairs(1, 35),
    ),
    Recipe(
        "torchao-example",
        "pytorch/ao/docs/source/examples/float8_training_example.py",
        torchao_example,
        lambda: torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta"),
    ),
    Recipe(
        "picollm-d24",
        "Montekkundan/llm/picollm/accelerated/fp8.py",
        picollm_d24,
        lambda: tokens(16, 2048, labels=False),
        stand_in="FP8 Linear after nanochat's own, which it copies",
    ),
    Recipe(
        "diffusers-torchao-flux-lora",
        "sayakpaul/diffusers-torchao/training/README.md",
        flux_lora,
        one_image,
        autocast=torch.bfloat16,
        stand_in="FLUX as torchtitan writes it",
    ),
)
