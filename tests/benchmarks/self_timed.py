"""A Trainer that times its own steps, for `run_beside.py`: ``self_timed.py OUT.json [--steps N] [--hidden N]
[--layers N] [--batch N] [--length N]``. It does not import fp8doctor."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY = 512


class Stamps(TrainerCallback):
    """When each step had ended, on the GPU too; and the processor's time of this process."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for name, default in (("steps", 600), ("hidden", 128), ("layers", 4), ("batch", 2), ("length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    heads = max(1, arguments.hidden // 128)
    config = LlamaConfig(
        hidden_size=arguments.hidden,
        intermediate_size=4 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    tokens = torch.randint(0, VOCABULARY, (arguments.batch * arguments.steps, arguments.length))
    stamps = Stamps()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=LlamaForCausalLM(config).bfloat16(),
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=arguments.batch,
                max_steps=arguments.steps,
                bf16=True,
                use_cpu=not torch.cuda.is_available(),
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                report_to=[],
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]
            callbacks=[stamps],
        ).train()
    arguments.out.write_text(json.dumps({"wall_s": stamps.wall_s, "cpu_s": stamps.cpu_s}))


if __name__ == "__main__":
    main()
