"""Recipes that do not train in FP8, by their configurations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from research.recipes.in_torchao import LLAMA_8B
from research.recipes.parts import LENGTH, Block, Decoder, Recipe, checkpointed, on_meta, tokens


def built(
    model: str,
    config: transformers.PretrainedConfig,
    checkpointing: bool = False,
    lora: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A model of transformers, ready to train as a recipe says."""
    config.use_cache = False
    made: Any = on_meta(lambda: getattr(transformers, model)(config), dtype)
    if lora:
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            made = get_peft_model(made, LoraConfig(**lora))
    if checkpointing:
        made.gradient_checkpointing_enable()
    return made.train()


def llama(**settings: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**settings)


LLAMA_1B = llama(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
LLAMA_70B = llama(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)
LLAMA_2_13B = llama(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40)
DEEPSEEK_LITE = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA_2B = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
GEMMA2_27B = {
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
}
GEMMA3_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
QWEN3_30B = {
    "num_hidden_layers": 48,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "head_dim": 128,
}
QWEN2_HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
ALL_OF_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Gpt(nn.Module):
    """nanoGPT: learnt positions, biases or none, a head tied to the embedding."""

    def __init__(self, layers: int, heads: int, width: int, vocabulary: int) -> None:
        super().__init__()
        blocks = (Block(width, heads, heads, 4 * width, gated=False) for _ in range(layers))
        self.decoder = Decoder(blocks, width, vocabulary)
        self.decoder.lm_head.weight = self.decoder.tok_embeddings.weight
        self.wpe = nn.Embedding(1024, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids)


def nanogpt_xl() -> nn.Module:
    return torch.compile(on_meta(lambda: Gpt(48, 25, 1600, 50257), torch.float32))


def mllama() -> nn.Module:
    return torch.compile(
        built(
            "MllamaForConditionalGeneration",
            transformers.MllamaConfig(),
            checkpointing=True,
            lora={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        )
    )


def titan_deepseek_16b() -> nn.Module:
    model = built("DeepseekV3ForCausalLM", transformers.DeepseekV3Config(**DEEPSEEK_LITE))
    checkpointed(model.model.layers, selective=True)  # type: ignore[union-attr, arg-type]
    return model


def titan_gpt_oss_20b() -> nn.Module:
    config = transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    model = built("GptOssForCausalLM", config)
    checkpointed(model.model.layers)  # type: ignore[union-attr, arg-type]
    return model


def classes(batch: int) -> dict[str, Tensor]:
    return {
        **tokens(batch, LENGTH, labels=False),
        "labels": torch.zeros(batch, dtype=torch.long, device="meta"),
    }


AXOLOTL, TUNE = "axolotl-ai-cloud/axolotl/examples", "pytorch/torchtune/recipes/configs"
LITGPT, TRL = "Lightning-AI/litgpt/config_hub/finetune", "huggingface/trl/trl/scripts"
RECIPES = (
    Recipe(
        "axolotl-alst-llama3-8b",
        f"{AXOLOTL}/alst/llama3-8b-deepspeed-alst.yaml",
        lambda: built("LlamaForCausalLM", LLAMA_8B, checkpointing=True),
        lambda: tokens(1, 500_000),
    ),
    Recipe(
        "axolotl-deepseek-v2-lite",
        f"{AXOLOTL}/deepseek-v2/fft-fsdp-16b.yaml",
        lambda: built(
            "DeepseekV2ForCausalLM", transformers.DeepseekV2Config(**DEEPSEEK_LITE), checkpointing=True
        ),
        lambda: tokens(1, 2048),
    ),
    Recipe(
        "axolotl-gemma3-1b",
        f"{AXOLOTL}/eaft/eaft-example.yml",
        lambda: built("Gemma3ForCausalLM", transformers.Gemma3TextConfig(**GEMMA3_1B), checkpointing=True),
        lambda: tokens(1, 1024),
    ),
    Recipe(
        "axolotl-llama-1b-lora",
        f"{AXOLOTL}/ebft/llama-1b-ebft-opencode-novllm.yaml",
        lambda: built(
            "LlamaForCausalLM",
            LLAMA_1B,
            checkpointing=True,
            lora={"r": 16, "lora_alpha": 32, "target_modules": list(ALL_OF_LLAMA)},
        ),
        lambda: tokens(2, 512),
    ),
    Recipe(
        "axolotl-qwen3-30b-a3b",
        f"{AXOLOTL}/expert_parallel/qwen3_30ba3b_ep_fft_4gpu.yaml",
        lambda: built("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**QWEN3_30B), checkpointing=True),
        lambda: tokens(1, 2048),
    ),
    Recipe(
        "axolotl-gemma2-2b-reward",
        f"{AXOLOTL}/gemma2/reward-model.yaml",
        lambda: built(
            "Gemma2ForSequenceClassification", transformers.Gemma2Config(num_labels=1), checkpointing=True
        ),
        lambda: classes(2),
    ),
    Recipe(
        "torchtune-llama3.2-vision-11b-lora",
        f"{TUNE}/dev/11B_lora_multi_dataset.yaml",
        mllama,
        lambda: None,
    ),
    Recipe(
        "torchtune-gemma-2b",
        f"{TUNE}/gemma/2B_full.yaml",
        lambda: built("GemmaForCausalLM", transformers.GemmaConfig(**GEMMA_2B), checkpointing=True),
        lambda: tokens(2, LENGTH),
    ),
    Recipe(
        "torchtune-gemma2-27b",
        f"{TUNE}/gemma2/27B_full.yaml",
        lambda: built("Gemma2ForCausalLM", transformers.Gemma2Config(**GEMMA2_27B), checkpointing=True),
        lambda: tokens(1, LENGTH),
    ),
    Recipe(
        "torchtune-llama2-13b",
        f"{TUNE}/llama2/13B_full.yaml",
        lambda: built("LlamaForCausalLM", LLAMA_2_13B, checkpointing=True),
        lambda: tokens(2, LENGTH),
    ),
    Recipe(
        "torchtune-llama3-70b",
        f"{TUNE}/llama3/70B_full.yaml",
        lambda: built("LlamaForCausalLM", LLAMA_70B, checkpointing=True),
        lambda: tokens(2, LENGTH),
    ),
    Recipe(
        "torchtune-llama3.2-1b",
        f"{TUNE}/llama3_2/1B_full.yaml",
        lambda: built("LlamaForCausalLM", LLAMA_1B),
        lambda: tokens(4, LENGTH),
    ),
    Recipe(
        "litgpt-falcon-7b-lora",
        f"{LITGPT}/falcon-7b/lora.yaml",
        lambda: built(
            "FalconForCausalLM",
            transformers.FalconConfig(),
            lora={"r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["query_key_value"]},
        ),
        lambda: tokens(1, 512),
        stand_in="one adapter on the fused projection for two on its query and value",
    ),
    Recipe(
        "litgpt-gemma-2b",
        f"{LITGPT}/gemma-2b/full.yaml",
        lambda: built("GemmaForCausalLM", transformers.GemmaConfig(**GEMMA_2B)),
        lambda: tokens(1, 512),
    ),
    Recipe(
        "litgpt-gemma-7b-lora",
        f"{LITGPT}/gemma-7b/lora.yaml",
        lambda: built(
            "GemmaForCausalLM",
            transformers.GemmaConfig(),
            lora={
                "r": 16,
                "lora_alpha": 16,
                "lora_dropout": 0.1,
                "target_modules": [*ALL_OF_LLAMA, "lm_head"],
            },
        ),
        lambda: tokens(1, 512),
    ),
    Recipe(
        "litgpt-gemma2-2b-lora",
        f"{LITGPT}/gemma2-2b/lora.yaml",
        lambda: built(
            "Gemma2ForCausalLM",
            transformers.Gemma2Config(),
            lora={
                "r": 8,
                "lora_alpha": 16,
                "lora_dropout": 0.1,
                "target_modules": [*ALL_OF_LLAMA, "lm_head"],
            },
        ),
        lambda: tokens(2, 512),
    ),
    Recipe(
        "trl-dpo-qwen2-0.5b",
        f"{TRL}/dpo.py",
        lambda: built(
            "Qwen2ForCausalLM",
            transformers.Qwen2Config(**QWEN2_HALF),
            checkpointing=True,
            dtype=torch.float32,
        ),
        lambda: tokens(4, 1024),
        autocast=torch.bfloat16,
    ),
    Recipe(
        "trl-dpo-qwen2-0.5b-lora",
        f"{TRL}/dpo.py",
        lambda: built(
            "Qwen2ForCausalLM",
            transformers.Qwen2Config(**QWEN2_HALF),
            checkpointing=True,
            dtype=torch.float32,
            lora={"r": 32, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
        ),
        lambda: tokens(4, 1024),
        autocast=torch.bfloat16,
    ),
    Recipe(
        "torchtitan-deepseek-v3-16b",
        "pytorch/torchtitan/torchtitan/models/deepseek_v3/config_registry.py",
        titan_deepseek_16b,
        lambda: tokens(4, 4096),
    ),
    Recipe(
        "torchtitan-gpt-oss-20b",
        "pytorch/torchtitan/torchtitan/models/gpt_oss/config_registry.py",
        titan_gpt_oss_20b,
        lambda: tokens(1, 8192),
    ),
    Recipe(
        "nanogpt-gpt2-xl",
        "karpathy/nanoGPT/config/finetune_shakespeare.py",
        nanogpt_xl,
        lambda: tokens(1, 1024, labels=False),
        autocast=torch.bfloat16,
    ),
)
