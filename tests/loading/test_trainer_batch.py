"""A batch of a real Trainer's own data is read as the Trainer would, and nothing of the Trainer moves."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8doctor import inspect_model
from fp8doctor.loading import trainer as loaded_trainer
from tests.looked import looked

ROWS, LENGTH, SIZE = 12, 10, 3

Make = Callable[..., Trainer]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
        )
    )


class Counting(Dataset[dict[str, Any]]):
    """Rows that move something of the dataset's own whenever one is read."""

    def __init__(self) -> None:
        self.read = 0
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> dict[str, Any]:
        self.read += 1
        random.random()
        row = torch.randint(64, (LENGTH,), generator=self.generator)
        return {"input_ids": row, "labels": row, "a column that no model takes": "text"}


class Stream(IterableDataset[dict[str, Any]]):
    """Rows of one iterator that is never begun again."""

    def __init__(self) -> None:
        self.rows = iter([{"input_ids": torch.full((LENGTH,), each)} for each in range(ROWS)])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.rows


@pytest.fixture
def make(tmp_path: Path, forget_accelerate: None) -> Make:
    def trainer(data: Any, kind: type[Trainer] = Trainer, model: Any = None, **options: Any) -> Trainer:
        arguments = TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=SIZE, use_cpu=True, report_to=[], **options
        )
        return kind(model=model or llama(), args=arguments, train_dataset=data)

    return trainer


def state(trainer: Trainer) -> dict[str, Any]:
    """What reading a batch in this process would change."""
    return {
        "attributes": dict(vars(trainer)),
        "arguments": dict(vars(trainer.args)),
        "accelerator": {**vars(trainer.accelerator), "_dataloaders": list(trainer.accelerator._dataloaders)},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "parameters": [each.detach().clone().tolist() for each in trainer.model.parameters()],
        "gradients": [each.grad for each in trainer.model.parameters()],
    }


def test_the_batch_of_its_own_data_loader(make: Make) -> None:
    data = Counting()
    trainer = make(data, bf16=True, gradient_accumulation_steps=2, dataloader_num_workers=2)
    before, generator = state(trainer), data.generator.get_state()
    report = looked(trainer)
    workload = report.facts.workload
    assert (workload.batch_source, workload.batch_size, workload.tokens) == ("given", SIZE, SIZE * LENGTH)
    assert (workload.loss_source, workload.accumulate) == ("output.loss", 2)
    assert workload.note == "from the Trainer's own data"
    assert report.facts.training.trainer.bf16 is True
    assert state(trainer) == before
    assert data.read == 0
    assert torch.equal(data.generator.get_state(), generator)
    assert trainer.optimizer is None


def test_an_iterator_is_not_consumed(make: Make) -> None:
    data = Stream()
    report = looked(make(data, max_steps=1))
    assert report.facts.workload.tokens == SIZE * LENGTH
    assert next(data.rows)["input_ids"][0] == 0


def test_data_that_raise(make: Make) -> None:
    report = looked(make([{"input_ids": torch.ones(3)}, {}]))
    workload = report.facts.workload
    assert workload.batch_source == "made up"
    assert workload.note is not None
    assert "the Trainer's own data gave none: " in workload.note


class Lines(Counting):
    """Reads a file that was opened before."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.write_text("".join(f"{each}\n" for each in range(1000)))
        self.file = path.open()

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": torch.full((LENGTH,), int(self.file.readline()) % 64)}


def test_an_open_file_stays_where_it_is(make: Make, tmp_path: Path) -> None:
    data = Lines(tmp_path / "lines")
    with data.file:
        assert looked(make(data)).facts.workload.batch_source == "given"
        assert data.file.readline() == "0\n"


class Starting(Counting):
    """Leaves a process behind, which keeps all files open."""

    def __init__(self) -> None:
        super().__init__()
        self.listen, self.tell = os.pipe()

    def __getitem__(self, at: int) -> dict[str, Any]:
        if not os.fork():
            while True:
                signal.pause()
        return super().__getitem__(at)


@pytest.mark.slow
def test_a_process_that_the_data_have_started_ends_with_the_reading(make: Make) -> None:
    data = Starting()
    assert looked(make(data)).facts.workload.batch_source == "given"
    os.close(data.tell)
    with os.fdopen(data.listen, "rb") as left:
        assert left.read() == b""  # the last that could write has ended


class Endless(Counting):
    def __getitem__(self, at: int) -> dict[str, Any]:
        while True:
            pass


class Dying(Counting):
    def __getitem__(self, at: int) -> dict[str, Any]:
        raise SystemExit


@pytest.mark.parametrize("data", [Endless, Dying])
def test_data_that_never_come(data: type[Counting], make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_trainer, "LONGEST_S", 0.2)
    workload = looked(make(data())).facts.workload
    assert workload.batch_source == "made up"
    assert workload.note is not None
    assert "ended early, or took longer than" in workload.note


def test_without_data_or_with_a_batch_of_the_users(make: Make) -> None:
    workload = looked(make(None)).facts.workload
    assert workload.batch_source == "made up"
    assert workload.note is not None
    assert "own data" not in workload.note
    given = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}
    assert looked(make(Dying()), given).facts.workload.tokens == 4


def test_a_look_reads_none_of_it(make: Make) -> None:
    workload = inspect_model(make(Dying()), trial=False).facts.workload
    assert workload.batch_source == "made up"
