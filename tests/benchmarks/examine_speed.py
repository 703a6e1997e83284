"""How long examining takes, on models of the meta device: ``python tests/benchmarks/examine_speed.py``.

The bounds are 0.25 s for an 8B Llama and 1 s for a 70B with LoRA on all linears; four times the depth may take no more
than about four times as long. Building the models (and adding LoRA) is not timed.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tabulate import tabulate
from torch import nn
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, logging

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.job import Job

SIZES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
BOUNDS_S = {("8B", False, 1): 0.25, ("70B", True, 1): 1.0}
ROUNDS = 5


def build(size: str, lora: bool, depth: int) -> nn.Module:
    """A Llama of FP8 Linears, ``depth`` times as deep as it is known, every block compiled."""
    sizes = SIZES[size] | {"num_hidden_layers": SIZES[size]["num_hidden_layers"] * depth}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256))
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
        for block in model.model.layers:
            block.compile()
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")) if lora else model


def timed(model: nn.Module) -> tuple[float, Facts]:
    """Median seconds of examining, and the facts."""
    job, seconds = Job(model=model, target=Target(), workload=Workload(), optimizer=torch.optim.SGD(model.parameters())), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        facts = examine(job, Facts(gaps={}))
        seconds.append(time.perf_counter() - start)
    return median(seconds), facts


def main() -> None:
    """Print one row for each model and depth."""
    logging.set_verbosity_error()
    rows = []
    for size, lora in (("8B", False), ("8B", True), ("70B", False), ("70B", True)):
        for depth in (1, 2, 4):
            seconds, facts = timed(build(size, lora, depth))
            modules, bound = facts.network.modules, BOUNDS_S.get((size, lora, depth))
            rows.append(
                (size, "LoRA" if lora else "", f"{depth}x", modules, len(facts.network.linears), 1e3 * seconds, 1e6 * seconds / modules, bound and 1e3 * bound)
            )
    print(tabulate(rows, ("Llama", "depth", "modules", "linears", "ms", "us a module", "bound ms"), floatfmt=".1f"))


if __name__ == "__main__":
    main()
