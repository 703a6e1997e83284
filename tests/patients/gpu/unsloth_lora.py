"""Unsloth's BF16 LoRA over a Llama that is made here from random numbers: no FP8, and nothing to complain of.

As a script it trains some steps: ``fp8doctor run unsloth_lora.py``.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
os.environ["UNSLOTH_COMPILE_LOCATION"] = tempfile.mkdtemp(prefix="unsloth_")

import unsloth  # it patches what is imported after it

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

MUST: tuple[str, ...] = ()
MUST_NOT = ("MOD001", "MOD003", "adapters-converted", "CMP001", "CMP002", "SHP001")
SILENT = True

WIDTH, HIDDEN, LAYERS, VOCABULARY, ROWS = 2048, 8192, 4, 32000, 2048
PROJECTIONS = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
}


def weights() -> dict[str, torch.Tensor]:
    """A Llama's, random."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    norms = ["model.norm.weight"]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": shape for name, shape in PROJECTIONS.items()}
        norms += [f"{at}.input_layernorm.weight", f"{at}.post_attention_layernorm.weight"]
    drawn = {name: (0.02 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    return drawn | {name: torch.ones(WIDTH, dtype=torch.bfloat16) for name in norms}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and made-up words."""
    words = ["<unk>", "<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number}" for number in range(len(words), VOCABULARY)]
    own = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def on_disk() -> str:
    """The folder of a checkpoint of its own for this process, as Unsloth wants to load it."""
    folder = Path(tempfile.mkdtemp(prefix="llama_"))
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 128,
        num_key_value_heads=WIDTH // 256,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def loaded(**settings: Any) -> torch.nn.Module:
    """The model by Unsloth's loader."""
    model, _ = unsloth.FastLanguageModel.from_pretrained(
        on_disk(),
        max_seq_length=ROWS,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        local_files_only=True,
        **settings,
    )
    return model


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """LoRA on all projections, as Unsloth's notebooks add it."""
    return unsloth.FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        target_modules=[name.rpartition(".")[2] for name in PROJECTIONS],
        use_gradient_checkpointing=False,
    )


def build_model() -> torch.nn.Module:
    return adapted(loaded(use_gradient_checkpointing=False))


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(4, VOCABULARY, (4, ROWS), device="cuda")
    return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def train(model: torch.nn.Module, steps: int = 40) -> None:
    """Train as a Trainer with bf16=True does."""
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), fused=True)
    model.train()
    for _ in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**example_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    train(build_model())
