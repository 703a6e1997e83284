"""ViT-B/16 with its encoder converted by torchao and run eagerly; 16 images of 197 tokens each."""

import torch
from torchao.float8 import convert_to_float8_training
from transformers import ViTConfig, ViTForImageClassification

MUST = ("CMP001",)
MUST_NOT = ("MOD001", "MOD003", "SHP001", "CMP002")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def build_model(layers: int = 12) -> torch.nn.Module:
    with torch.device(DEVICE):
        model = ViTForImageClassification(ViTConfig(num_hidden_layers=layers, num_labels=1000)).bfloat16()
    return convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "classifier")


def example_batch() -> dict[str, torch.Tensor]:
    images = torch.randn(16, 3, 224, 224, dtype=torch.bfloat16, device=DEVICE)
    return {"pixel_values": images, "labels": torch.randint(0, 1000, (16,), device=DEVICE)}
