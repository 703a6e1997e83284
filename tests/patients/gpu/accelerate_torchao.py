"""FP8 through Accelerate and torchao as it should be: Accelerate compiles block by block, and the
weights stay those that the optimizer holds."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, TorchDynamoPlugin
from torchao.float8 import Float8LinearConfig
from transformers import LlamaConfig, LlamaForCausalLM

MUST: tuple[str, ...] = ()
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD007", "ENV001", "ENV002", "ENV003", "SHP001")
SILENT = True


def accelerated(
    layers: int, plugin: TorchDynamoPlugin | None
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    recipe = AORecipeKwargs(config=Float8LinearConfig())
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], dynamo_plugin=plugin)
    return accelerator.prepare(model, optimizer)


def build_model(layers: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return accelerated(layers, TorchDynamoPlugin(backend="inductor", use_regional_compilation=True))


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 2048), device="cuda")
    return {"input_ids": tokens, "labels": tokens}
