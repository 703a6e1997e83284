"""The callback in real Lightning Trainers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.watched import PROFILED, STEPS, WARMUP, clock_of_reads, hold_only_steps, left_behind
from tests.markdown import fenced

lightning = pytest.importorskip("lightning.pytorch")

from fp8doctor.integrations.lightning import FP8DoctorCallback  # noqa: E402


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A model inside a LightningModule, which is not called itself."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, fails_at: int = -1) -> None:
        super().__init__()
        self.kind, self.fails_at = kind, fails_at
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise RuntimeError("the user's own")
        loss: torch.Tensor = (self.inner(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.01)  # type: ignore[call-arg]


def fit(model: Any, *callbacks: Any, steps: int = PROFILED + 1, **options: Any) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_train_batches=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    rows = TensorDataset(torch.randn(4 * steps, 16))
    trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True))
    return trainer


def callback(**options: Any) -> FP8DoctorCallback:
    return FP8DoctorCallback(**{"steps": STEPS, "warmup": WARMUP} | options)


def made(**options: Any) -> Net:
    torch.manual_seed(1)
    return Net(**options)


def result(model: Net, *callbacks: Any) -> Any:
    trainer = fit(model, *callbacks)
    weights = [each.detach().numpy().tobytes() for each in model.parameters()]
    return weights, torch.get_rng_state().tolist(), random.getstate(), trainer.callback_metrics["loss"].item()


@pytest.mark.slow
def test_a_training_is_watched_and_ends_as_without_it(capfd: Any) -> None:
    before = result(made())
    capfd.readouterr()
    model, watching = made(), callback()
    assert result(model, watching) == before
    assert left_behind(model) == []
    out, err = capfd.readouterr()
    assert "fp8doctor" not in out
    assert err.count(" Net: ") == 1
    assert watching.report is not None
    facts = watching.report.facts
    assert (len(facts.observed.steps_ms), facts.observed.calls) == (STEPS, 1)
    assert facts.observed.data_ms is not None
    assert (facts.workload.batch_source, facts.workload.batch_size) == ("given", 4)
    assert facts.training.optimizer == "torch.optim.adamw.AdamW"
    assert facts.training.gradients_seen


def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def trainer(**options: Any) -> Any:
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        return lightning.Trainer(accelerator="cpu", logger=False, **quiet, **options)

    loader = DataLoader(TensorDataset(torch.randn(4, 16)))
    names: dict[str, Any] = {"Trainer": trainer, "module": made(), "loader": loader}
    example = fenced("example: lightning").replace("max_steps=1000", "max_steps=4")
    exec(compile(example, "docs/api.md", "exec"), names)
    assert (tmp_path / "report.md").read_text().startswith("## ")


@pytest.mark.slow
def test_a_validation_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read = clock_of_reads(monkeypatch)

    class Validated(TensorDataset):
        def __getitem__(self, number: int) -> Any:
            read.append(number)
            return super().__getitem__(number)

    model, watching = made(), callback()
    model.validation_step = lambda batch, batch_idx: None
    model.val_dataloader = lambda: DataLoader(Validated(torch.randn(8, 16)), batch_size=4)
    fit(model, watching, val_check_interval=1, num_sanity_val_steps=0)
    assert len(read) == 8 * (PROFILED + 1)
    hold_only_steps(watching)


def test_a_training_that_fails_in_the_window(capfd: Any) -> None:
    model, watching = made(fails_at=WARMUP + 1), callback(fail_on="info")
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(model, watching)
    assert left_behind(model) == []
    assert watching.report is not None
    assert "the training ended after 3 steps, before 5 were watched" in capfd.readouterr().err
