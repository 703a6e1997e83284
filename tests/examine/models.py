"""Small real models for the tests of examine, and how their facts are taken."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from fp8doctor.examine import examine
from fp8doctor.examine.module_facts import examine_network
from fp8doctor.examine.training_state import examine_training
from fp8doctor.examine.walk import walk
from fp8doctor.facts import Facts, Linear, Network, Target, Training, Workload
from fp8doctor.loading.job import Job
from fp8doctor.trial import with_forward

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "use_cache": False,
}


def llama(device: str = "cpu", **changes: Any) -> LlamaForCausalLM:
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


def llama_8b() -> LlamaForCausalLM:
    """Llama-3-8B, on the meta device."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    return llama("meta", num_hidden_layers=32, **sizes)


def lora(model: nn.Module, rank: int = 16, **settings: Any) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", **settings))


class StoredLinear(nn.Linear):
    """A frozen Linear that keeps its weight in FP8, as trainers of diffusion models write it."""

    def __init__(self, *sides: int) -> None:
        super().__init__(*sides, bias=False, dtype=torch.bfloat16)
        self.weight = nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.to(input.dtype))


def low_rank(base: nn.Module, down: str, up: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a module that holds a base of 64 x 64 and two matrices of rank 4, by these paths."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.org = base
            for path, sides in ((down, (64, 4)), (up, (4, 64))):
                holder, _, name = path.rpartition(".")
                if holder and holder not in self._modules:
                    self.add_module(holder, nn.Module())
                self.get_submodule(holder).add_module(name, nn.Linear(*sides, bias=False, dtype=dtype))

        def forward(self, input: Tensor) -> Tensor:
            low = self.get_submodule(down)(input.to(dtype))
            return self.org(input) + self.get_submodule(up)(low).to(input.dtype)

    return Adapted()


def qwen3_moe() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    )


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0)
    )


def vit() -> ViTForImageClassification:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8))


class Block(nn.Module):
    """A residual block of two Linears."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stacked(nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def network(model: nn.Module, gaps: dict[str, str] | None = None, training_step: Any = None) -> Network:
    return examine_network(walk(model, training_step), {} if gaps is None else gaps)


def by_name(model: nn.Module, **arguments: Any) -> dict[str, Linear]:
    return {each.name: each for each in network(model, **arguments).linears}


def training(model: nn.Module, gaps: dict[str, str] | None = None, **fields: Any) -> Training:
    job = Job(model=model, target=Target(), workload=Workload(), **fields)
    return examine_training(walk(model, job.training_step), job, {} if gaps is None else gaps)


def called(model: nn.Module, batch: Any, **fields: Any) -> Facts:
    """Facts of a live model, with what a forward of it calls."""
    job = Job(model=model, target=Target(), workload=Workload(), batch=batch, **fields)
    return with_forward(job, examine(job))
