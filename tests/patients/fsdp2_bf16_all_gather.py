"""FSDP2 over tensorwise FP8 layers without the flag: the weights travel in BF16 and are cast on every
process."""

from fsdp2_float8 import example_batch, sharded
from torch import nn

__all__ = ["build_model", "example_batch"]

MUST = ("DST001",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "SHP001", "STP004")


def build_model() -> nn.Module:
    model = sharded(all_gather=False)
    for block in model:
        block.compile()
    return model
