"""LLaVA in transformers' shape, its decoder cut at 6 layers: rowwise FP8 by a filter on the decoder alone,
the vision tower frozen in BF16, eager."""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

RECIPE = "rowwise"
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, VOCABULARY = size((6, 4096, 11008, 32, 32064), (2, 64, 128, 4, 512))
TOWER, TOWER_WIDTH, SIDE, PATCH = size((24, 1024, 336, 14), (2, 32, 56, 14))
BATCH, TEXT, IMAGE = size((6, 448, 32000), (2, 16, 500))
PATCHES = (SIDE // PATCH) ** 2
SKIP = ("lm_head", "vision_tower", "multi_modal_projector")
VARIANTS = changes("*", skip=SKIP)


def in_decoder(layer: nn.Module, name: str) -> bool:
    return "language_model" in name


def build_model() -> nn.Module:
    vision = CLIPVisionConfig(
        hidden_size=TOWER_WIDTH,
        intermediate_size=4 * TOWER_WIDTH,
        num_hidden_layers=TOWER,
        num_attention_heads=TOWER_WIDTH // 16 if TOWER_WIDTH < 64 else TOWER_WIDTH // 64,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    whole = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    with built():
        model = LlavaForConditionalGeneration(whole).train()
    model.model.vision_tower.requires_grad_(False)
    config = Float8LinearConfig.from_recipe_name("rowwise")
    return convert_to_float8_training(model, config=config, module_filter_fn=in_decoder)


def example_batch() -> dict[str, torch.Tensor]:
    text = torch.randint(0, IMAGE, (BATCH, TEXT), device=DEVICE)
    image = torch.full((BATCH, PATCHES), IMAGE, device=DEVICE)
    ids = torch.cat((text[:, :8], image, text[:, 8:]), dim=1)
    labels = torch.cat((torch.full_like(ids[:, : 8 + PATCHES], -100), text[:, 8:]), dim=1)
    pixels = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16)
    return {"input_ids": ids, "pixel_values": pixels, "labels": labels}
