"""One process of `run_lockstep.py`, which tells it on stdin when to make a step: ``lockstep_job.py
trainer|nanogpt [--compiled]``. It does not import fp8doctor."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "jobs"))

import torch
from gpt_124m_whole import GPT, LENGTH, VOCABULARY
from plain import DEVICE, size, to_float8
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

BATCH = 4
EXAMPLES = 64
LAST_STEP = 20_000


class Turns:
    """The turns of this process: a few steps each."""

    def __init__(self) -> None:
        self.told, self.tell = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self.left, self.steps = 0, list[tuple[float, float]]()
        self.began = 0.0

    def wait(self) -> None:
        """Wait for the next turn, or end the process."""
        line = self.told.readline()
        if not line:
            os._exit(0)
        self.left, self.steps = int(line), []
        self.began = time.perf_counter()

    def end_step(self, loss: torch.Tensor) -> None:
        """Note the step's time and loss. At the end of a turn, report them and wait."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.steps.append((round((time.perf_counter() - self.began) * 1e3, 3), loss.item()))
        if len(self.steps) == self.left:
            self.tell.write(json.dumps(self.steps).encode() + b"\n")
            self.wait()
        else:
            self.began = time.perf_counter()


def nanogpt(turns: Turns, compiled: bool) -> None:
    """Train as nanoGPT's train.py does: fp32 weights, BF16 autocast, clipped gradients, no FP8."""
    ids = torch.randint(0, VOCABULARY, (EXAMPLES, LENGTH + 1))
    base = GPT().to(DEVICE)
    decayed = [each for each in base.parameters() if each.dim() >= 2]
    others = [each for each in base.parameters() if each.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    scaler = torch.amp.GradScaler(DEVICE, enabled=False)
    model: Any = torch.compile(base) if compiled else base
    turns.wait()
    for step in range(LAST_STEP):
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 + 9e-5 * 0.5 * (1 + math.cos(math.pi * step / LAST_STEP))
        batch = ids[torch.randint(EXAMPLES, (BATCH,))]
        if DEVICE == "cuda":
            batch = batch.pin_memory().to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            _, loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        turns.end_step(loss.detach())


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same few examples over and over, in one long epoch."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.ids = torch.randint(0, vocabulary, (EXAMPLES, length))

    def __len__(self) -> int:
        return LAST_STEP * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index % EXAMPLES], "labels": self.ids[index % EXAMPLES]}


class LossKeepingTrainer(Trainer):
    """Keeps the loss of the last step."""

    last_loss: torch.Tensor

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.last_loss = loss.detach()
        return loss


class InTurn(TrainerCallback):
    """Makes the Trainer wait for its turns."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.trainer: LossKeepingTrainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.turns.end_step(self.trainer.last_loss)


def trainer(turns: Turns, compiled: bool) -> None:
    """Train a Llama with transformers' Trainer: in FP8 (torchao, tensorwise) if compiled, else in BF16."""
    layers, width, heads, vocabulary, length = size((4, 1024, 8, 32000, 512), (2, 64, 2, 256, 32))
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config).bfloat16()
    if compiled:
        model = to_float8(model)
    callback = InTurn(turns)
    with tempfile.TemporaryDirectory() as folder:
        callback.trainer = LossKeepingTrainer(
            model=model,
            args=TrainingArguments(
                folder,
                per_device_train_batch_size=BATCH,
                max_steps=LAST_STEP,
                bf16=True,
                torch_compile=compiled,
                use_cpu=DEVICE == "cpu",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                report_to=[],
            ),
            train_dataset=Examples(vocabulary, length),
            callbacks=[callback],
        )
        callback.trainer.train()


if __name__ == "__main__":
    torch.manual_seed(0)
    {"nanogpt": nanogpt, "trainer": trainer}[sys.argv[1]](Turns(), "--compiled" in sys.argv)
