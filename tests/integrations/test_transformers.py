"""The callback in real Trainers: the steps watched, one report, and a training that goes on as without it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from fp8doctor.health.record import read_health
from fp8doctor.integrations import FP8DoctorCallback
from fp8doctor.report import ReportFailed
from tests.integrations.watched import PROFILED, STEPS, WARMUP, clock_of_reads, hold_only_steps, left_behind
from tests.markdown import fenced

Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path, forget_accelerate: None) -> Make:
    def trainer(
        *callbacks: Any,
        kind: type[Trainer] = Trainer,
        fp8: bool = False,
        emulated: bool = False,
        steps: int = PROFILED + 1,
        **options: Any,
    ) -> Trainer:
        torch.manual_seed(0)
        random.seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
        )
        model = LlamaForCausalLM(config)
        if fp8:
            convert_to_float8_training(model, config=Float8LinearConfig(emulate=emulated))
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (8 * steps, 16))]
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            per_device_train_batch_size=2,
            max_steps=steps,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=1,
            **options,
        )
        return kind(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))

    return trainer


def callback(**options: Any) -> FP8DoctorCallback:
    return FP8DoctorCallback(**{"steps": STEPS, "warmup": WARMUP} | options)


def result(trainer: Trainer) -> dict[str, Any]:
    """What a training leaves, bit by bit."""
    trainer.train()
    timed = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return {
        "weights": {name: each.detach().numpy().tobytes() for name, each in trainer.model.named_parameters()},
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "logs": [
            {key: value for key, value in each.items() if key not in timed}
            for each in trainer.state.log_history
        ],
    }


@pytest.mark.slow
def test_a_training_is_watched_and_ends_as_without_it(make: Make, capfd: Any) -> None:
    before = result(make(fp8=True, gradient_accumulation_steps=2))
    capfd.readouterr()
    watching = callback()
    trainer = make(watching, fp8=True, gradient_accumulation_steps=2)
    assert result(trainer) == before
    assert left_behind(trainer.model) == []
    out, err = capfd.readouterr()
    assert "fp8doctor" not in out
    assert err.count("LlamaForCausalLM: ") == 1
    assert 'report.save("report.json")' in err
    assert "-o report.html" not in err
    report = watching.report
    assert report is not None
    facts = report.facts
    assert (len(facts.observed.steps_ms), facts.observed.calls) == (STEPS, 2)
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_source, facts.workload.tokens) == ("given", 2 * 16)
    assert facts.training.trainer.kind.endswith("TrainingArguments")
    assert facts.training.optimizer == "torch.optim.adamw.AdamW"
    assert facts.training.gradients_seen
    assert facts.observed.breakdown is not None
    assert facts.training.conversion is None


@pytest.mark.slow
def test_a_training_pauses_to_time_copies_and_ends_as_without_them(make: Make) -> None:
    before = result(make())
    watching = callback(budget_s=4, device="cpu")
    assert result(make(watching)) == before
    assert watching.report is not None
    (as_is, *_) = watching.report.facts.trial.arms
    assert (as_is.name, as_is.tried) == ("as_is", True)


class Converting(Trainer):
    """Converts the model when it makes the optimizer, and fails once."""

    fails = False

    def create_optimizer(self, *given: Any) -> Any:
        convert_to_float8_training(self.model)
        return super().create_optimizer(*given)

    def training_step(self, *given: Any, **named: Any) -> Any:
        if self.fails and self.state.global_step > WARMUP:
            raise RuntimeError("the user's own")
        return super().training_step(*given, **named)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_training_that_converts_and_one_that_fails_and_begins_again(fails: bool, make: Make) -> None:
    watching = callback()
    trainer: Any = make(watching, kind=Converting)
    if fails:
        trainer.fails = True
        with pytest.raises(RuntimeError, match="the user's own"):
            trainer.train()
        assert watching.report is None
        trainer.fails = False
    trainer.train()
    assert watching.report is not None
    conversion = watching.report.facts.training.conversion
    assert conversion is None if fails else conversion.linears == 15
    assert len(watching.report.facts.observed.steps_ms) == STEPS
    assert left_behind(trainer.model) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "code"),
    [({"fail_on": "warning", "ignore": "ENV,MOD"}, "CMP001"), ({"require_fp8": True}, "MOD002")],
)
def test_a_gate_stops_the_training(
    gate: dict[str, Any], code: str, make: Make, tmp_path: Path, capfd: Any
) -> None:
    path = tmp_path / "report.json"
    trainer = make(callback(output=path, **gate), fp8=True, emulated=True)
    with pytest.raises(ReportFailed, match=code):
        trainer.train()
    assert trainer.state.global_step == PROFILED - 1  # the Trainer counts a step after its callbacks
    assert left_behind(trainer.model) == []
    assert json.loads(path.read_text())["verdict"]["status"]
    assert code not in capfd.readouterr().err


def test_other_processes_are_silent(make: Make, capfd: Any) -> None:
    watching = callback(fail_on="info")
    trainer = make(steps=2)
    trainer.state.is_world_process_zero = False
    trainer.is_world_process_zero = lambda: False
    trainer.add_callback(watching)
    trainer.train()
    assert watching.report is None
    assert "fp8doctor" not in capfd.readouterr().err
    assert left_behind(trainer.model) == []


@pytest.mark.slow
def test_what_fails_here_is_told_in_a_sentence(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise KeyError("a defect of ours")

    monkeypatch.setattr("fp8doctor.integrations.watching.diagnose", fail)
    trainer = make(callback())
    trainer.train()
    assert trainer.state.global_step == PROFILED + 1
    assert "fp8doctor: it could not go on: KeyError: 'a defect of ours'" in capfd.readouterr().err
    assert left_behind(trainer.model) == []


def test_the_example_of_the_readme(make: Make, capfd: Any) -> None:
    trainer = make(steps=3)
    names: dict[str, Any] = {"Trainer": Trainer, "model": trainer.model, "args": trainer.args}
    names["dataset"] = trainer.train_dataset
    exec(compile(fenced("example: transformers"), "docs/api.md", "exec"), names)
    assert "the training ended after 3 steps, before 15 were watched" in capfd.readouterr().err


def test_an_evaluation_and_a_save_are_no_part_of_a_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read = clock_of_reads(monkeypatch)

    class Evaluated(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            read.append(number)
            return super().__getitem__(number)

    class Saving(Trainer):
        def save_model(self, *args: Any, **others: Any) -> None:
            read.append(0)
            super().save_model(*args, **others)

    watching = callback()
    trainer = make(watching, kind=Saving, eval_steps=1, save_steps=1)
    trainer.args.eval_strategy = trainer.args.save_strategy = IntervalStrategy.STEPS
    trainer.eval_dataset = Evaluated(trainer.train_dataset[:8])
    trainer.train()
    assert len(read) >= 9 * (PROFILED + 1)
    hold_only_steps(watching)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget_s": "60"}, "budget_s has to be a positive number of seconds, not '60'"),
        ({"every": 0}, "every has to be a whole number, 1 or more, not 0"),
        ({"fail_on": "errors"}, "fail_on is one of never, info, warning, error, not 'errors'"),
        ({"select": "NOSUCH"}, "no check has a code that begins with 'NOSUCH'"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        FP8DoctorCallback(**options)


@pytest.mark.slow
def test_health_is_sampled_to_the_end(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "health"
    watching = callback(output=tmp_path / "report.md", health=path, every=2)
    trainer = make(watching, fp8=True, steps=PROFILED + 8)
    trainer.train()
    health = read_health(path)
    assert health.steps == tuple(range(health.steps[0], PROFILED + 9, 2))
    assert len(health.steps) >= 3
    assert len(health.layers) == 15
    assert all(sample.loss and sample.gradient_norm for _, sample in health.samples)
    assert not any(module._forward_hooks for module in trainer.model.modules())
