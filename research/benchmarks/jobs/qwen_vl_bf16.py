"""Qwen2.5-VL in transformers' shape, cut at 6 layers of 3,584 and 8 of the vision tower, which is trained
too: two images of unlike sizes a sequence. BF16, eager: what would FP8 give?"""

from __future__ import annotations

import torch
from plain import DEVICE, built, changes, size
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

RECIPE = None
WHOLE = False
LAYERS, WIDTH, INNER, HEADS, GROUPS = size((6, 3584, 18944, 28, 4), (2, 64, 128, 4, 2))
TOWER, TOWER_WIDTH, TOWER_INNER, TOWER_HEADS = size((8, 1280, 3420, 16), (2, 64, 128, 4))
VOCABULARY, BATCH, TEXT = size((32000, 4, 1024), (256, 2, 32))
GRIDS = size(((1, 48, 64), (1, 32, 32)), ((1, 8, 8), (1, 4, 8)))
MERGED, PATCH = 2, 14
START, END, IMAGE = VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
VARIANTS = changes("*")


def build_model() -> nn.Module:
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "vocab_size": VOCABULARY,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": size([16, 24, 24], [2, 3, 3]),
            },
            "use_cache": False,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": TOWER,
            "hidden_size": TOWER_WIDTH,
            "intermediate_size": TOWER_INNER,
            "num_heads": TOWER_HEADS,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": size([3, 7], [1]),
        },
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with built():
        return Qwen2_5_VLForConditionalGeneration(config).train()


def example_batch() -> dict[str, torch.Tensor]:
    row = torch.randint(1, START, (TEXT,), device=DEVICE)
    pieces = [row[: TEXT // 2]]
    for _, high, wide in GRIDS:
        places = torch.full((high * wide // MERGED**2,), IMAGE, device=DEVICE)
        pieces += [row.new_tensor([START]), places, row.new_tensor([END])]
    ids = torch.cat([*pieces, row[TEXT // 2 :]]).expand(BATCH, -1).contiguous()
    ids = ids[:, : ids.shape[1] // 16 * 16]
    patches = BATCH * sum(high * wide for _, high, wide in GRIDS)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": torch.where(ids < START, ids, -100),
        "pixel_values": torch.randn(patches, 3 * 2 * PATCH**2, device=DEVICE, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor(GRIDS * BATCH, device=DEVICE),
    }
