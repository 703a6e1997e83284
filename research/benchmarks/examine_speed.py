"""How long examining takes, on models of the meta device: ``python research/benchmarks/examine_speed.py``.

The bounds are 0.25 s for an 8B Llama and 1 s for a 70B with LoRA on all linears; with four times the depth a
module may take little longer than before. Building the models (and adding LoRA) is not timed. Exits with 1
when a bound is missed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from peft import LoraConfig, get_peft_model
from tabulate import tabulate
from torch import nn
from torch.optim import SGD
from torchao.float8 import convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, logging

from fp8doctor.examine import examine
from fp8doctor.facts import Facts, Target, Workload
from fp8doctor.loading.job import Job
from research.benchmarks.machine import machine

SIZES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
}
BOUNDS_S = {("8B", False, 1): 0.25, ("70B", True, 1): 1.0}
MOST_GROWTH = 1.3
"""Time of a module in a model four times as deep / in the model itself: 1 is linear, 4 would be quadratic.
The least of all rounds counts; the rest is the noise of a shared machine."""

DEPTHS = (1, 2, 4)
ROUNDS = 7
"""Of each model, the depths in turn, so that what disturbs the machine disturbs them all."""


def build(size: str, lora: bool, depth: int) -> nn.Module:
    """A Llama of FP8 Linears, ``depth`` times as deep as it is known, every block compiled."""
    sizes = SIZES[size] | {"num_hidden_layers": SIZES[size]["num_hidden_layers"] * depth}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=128256))
        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
        for block in model.model.layers:
            block.compile()
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear")) if lora else model


def examined(job: Job) -> tuple[float, Facts]:
    """Seconds of examining, and the facts."""
    start = time.perf_counter()
    facts = examine(job, Facts(gaps={}))
    return time.perf_counter() - start, facts


def main() -> int:
    """Print one row for each model and depth; 1 when a bound is missed."""
    logging.set_verbosity_error()
    rows, missed = [], []
    for size, lora in (("8B", False), ("8B", True), ("70B", False), ("70B", True)):
        models = {depth: build(size, lora, depth) for depth in DEPTHS}
        jobs = {
            depth: Job(model=each, target=Target(), workload=Workload(), optimizer=SGD(each.parameters()))
            for depth, each in models.items()
        }
        rounds = [{depth: examined(job) for depth, job in jobs.items()} for _ in range(ROUNDS)]
        each_us = {}
        for depth in DEPTHS:
            seconds, network = [each[depth][0] for each in rounds], rounds[0][depth][1].network
            bound = BOUNDS_S.get((size, lora, depth))
            each_us[depth] = 1e6 * min(seconds) / network.modules
            name = f"{size}{', LoRA' if lora else ''}, {depth}x"
            rows.append(
                (
                    name,
                    network.modules,
                    len(network.linears),
                    1e3 * median(seconds),
                    1e3 * min(seconds),
                    bound and 1e3 * bound,
                    each_us[depth],
                )
            )
            if bound and median(seconds) > bound:
                missed.append(f"{name}: {median(seconds):.2f} s is over the bound of {bound} s")
        growth = each_us[DEPTHS[-1]] / each_us[DEPTHS[0]]
        if growth > MOST_GROWTH:
            missed.append(
                f"{name}: {growth:.2f} times as long a module as at {DEPTHS[0]}x, which is not linear"
            )
    print(machine(("torch", "transformers", "peft", "torchao")))
    print(
        tabulate(
            rows,
            ("Llama", "modules", "linears", "median ms", "least ms", "bound ms", "least us a module"),
            floatfmt=".0f",
            tablefmt="github",
        )
    )
    for sentence in missed:
        print(sentence)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
