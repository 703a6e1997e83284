"""A converter of one's own that copies weights into new layers: ties, hooks and the optimizer's parameters
are lost on the way."""

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import LlamaConfig, LlamaForCausalLM

MUST = ("MOD007", "tied-weights-untied", "hooks-or-subclass-lost")
MUST_NOT = ("MOD001", "MOD003", "MOD004", "emulated-fp8", "CMP001", "SHP001")

DEVICE = "cuda" if torch.cuda.is_available() else "meta"


def scale(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(0.5 * each for each in arguments)


def convert(model: nn.Module) -> None:
    """What Accelerate does for Transformer Engine, done for torchao."""
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear):
            copy = nn.Linear(
                module.in_features,
                module.out_features,
                module.bias is not None,
                dtype=module.weight.dtype,
                device=DEVICE,
            )
            copy.weight.data.copy_(module.weight.data)
            setattr(model, name, Float8Linear.from_float(copy, config=Float8LinearConfig()))
        else:
            convert(module)


def build_model(layers: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32000,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(scale)
    convert(model)
    model.compile()
    return model, optimizer


def example_batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 32000, (4, 1024), device=DEVICE)
    return {"input_ids": tokens, "labels": tokens}
