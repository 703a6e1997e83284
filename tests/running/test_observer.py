"""The observer on real training loops in this process: the model found, its steps timed, its batch captured,
nothing compiled again, nothing left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import recorded
from fp8doctor.render import text
from fp8doctor.render.answer import answer
from fp8doctor.running.calls import ATTRIBUTE
from fp8doctor.running.clock import Clock
from fp8doctor.running.living import Living
from fp8doctor.running.messages import Stepped
from fp8doctor.running.observer import IDLE_STEPS, Observer
from fp8doctor.running.ownership import owner
from fp8doctor.running.recording import CUT_SHORT, GAVE_WAY
from fp8doctor.running.settings import Settings
from fp8doctor.trial.measure.evidence import ANOTHER_PROFILER
from tests.checks.environment.live import finding_of
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.stand_ins.deepspeed_optimizer import ZeroOptimizer


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        output: torch.Tensor = x + scale * self.down(nn.functional.gelu(self.up(x)))
        return output


class Net(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale)
        return x


class Slicing(Net):
    """Makes a ModuleList in its forward, as the models of transformers do."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x, scale)
        return x


def train(
    model: Any, steps: int, call: Callable[..., Any] | None = None, optimizer: Any = None
) -> torch.optim.Optimizer:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = (model if call is None else call)(torch.randn(8, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer  # type: ignore[no-any-return]


def test_a_plain_loop(observer: Observer, heard: Heard) -> None:
    model = Net()
    optimizer = train(model, WARMUP + STEPS + PROFILED)
    facts = heard.facts
    assert (facts.target.kind, facts.target.name) == ("script", "train.py")
    assert len(facts.network.linears) == 4
    assert (facts.workload.batch_source, facts.workload.batch_size) == ("given", 8)
    assert facts.training.optimizer == "torch.optim.sgd.SGD"
    assert facts.training.gradients_seen
    seen = facts.observed
    assert len(seen.steps_ms) == STEPS
    assert (seen.warmup, seen.calls, seen.clock, seen.share_pct) == (WARMUP, 1, "host", 100)
    assert seen.data_ms is None
    assert heard.notes == []
    assert all(ATTRIBUTE not in vars(module) for module in model.modules())
    before = len(heard.messages)
    train(model, 2, optimizer=optimizer)
    assert len(heard.messages) == before


def test_facts_are_there_after_the_first_step(observer: Observer, heard: Heard) -> None:
    train(Net(), 1)
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.training.gradients_seen
    assert not recorded(facts, "observed")
    assert observer.closed() == 1
    assert not recorded(heard.facts, "observed")


def test_a_window_that_is_cut_short(heard: Heard, observer: Observer) -> None:
    observer.settings = Settings("train.py", 10, WARMUP, stop=False, budget_s=None, device=None)
    model = Net()
    train(model, WARMUP + STEPS)
    assert observer.closed() == WARMUP + STEPS
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert ATTRIBUTE not in vars(model)


def test_the_weights_of_a_moving_average_are_not_the_model(observer: Observer, heard: Heard) -> None:
    model = Net()
    average = copy.deepcopy(model)
    train(model, WARMUP + STEPS, call=lambda x: (model(x), average(x))[0])
    assert heard.facts.observed.calls == 1


def test_the_optimizer_that_holds_most_counts(observer: Observer, heard: Heard) -> None:
    large, small = Net(3), Net(1)
    both = [torch.optim.SGD(small.parameters(), lr=0.01), torch.optim.AdamW(large.parameters(), lr=0.01)]
    for _ in range(WARMUP + STEPS):
        for model, optimizer in zip((small, large), both, strict=True):
            train(model, 1, optimizer=optimizer)
    facts = heard.facts
    assert len(facts.network.linears) == 6
    assert facts.observed.optimizers == ("torch.optim.adamw.AdamW", "torch.optim.sgd.SGD")
    assert len(facts.observed.steps_ms) == STEPS


def test_an_optimizer_that_is_done_with_makes_room(observer: Observer, heard: Heard) -> None:
    kept = train(Net(), WARMUP + 1)
    assert observer.window is not None
    train(Net(3), WARMUP + STEPS)  # larger
    assert kept.param_groups
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert len(heard.facts.network.linears) == 6


def test_a_trial_run_with_an_optimizer_of_its_own(observer: Observer, heard: Heard) -> None:
    first = Net()
    kept = train(first, WARMUP + 1)
    second = Net()
    train(second, IDLE_STEPS + STEPS + PROFILED)
    assert kept.param_groups
    assert all(ATTRIBUTE not in vars(module) for module in first.modules())
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert observer.done


def test_a_trial_run_that_is_forgotten(observer: Observer, heard: Heard) -> None:
    train(Net(), WARMUP + 1)
    assert observer.window is not None
    train(Net(1), WARMUP + STEPS)
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert len(heard.facts.network.linears) == 2


def test_a_model_that_ends_in_the_window_is_not_kept_alive(observer: Observer) -> None:
    model = Net()
    train(model, WARMUP + 1)
    assert ATTRIBUTE in vars(model)
    ended = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ended() is None
    finally:
        gc.enable()


def test_a_window_of_another_model_than_the_first_that_stepped(observer: Observer, heard: Heard) -> None:
    small, large = Net(1), Net(2)
    first = train(small, 1)
    train(large, WARMUP + 3)
    assert first.param_groups
    observer.closed()
    assert len(heard.facts.network.linears) == 4


def test_an_optimizer_that_is_built_anew_for_every_step(observer: Observer, heard: Heard) -> None:
    model = Net()
    for _ in range(WARMUP + STEPS):
        train(model, 1)
    assert len(heard.facts.observed.steps_ms) == STEPS


class Count(TorchDispatchMode):
    """Counts operations, as a user's own mode does."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_of_the_script_sees_the_script_alone(observer: Observer) -> None:
    counts = []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS + PROFILED + 1):
        with Count() as mode:
            train(model, 1, optimizer=optimizer)
        counts.append(mode.operations)
    assert observer.done
    assert len(set(counts[1:])) == 1


def test_micro_batches(observer: Observer, heard: Heard) -> None:
    model = Net()
    train(model, WARMUP + STEPS, call=lambda x: model(x) + model(x[:4]).mean())
    assert heard.facts.observed.calls == 2
    assert heard.facts.workload.accumulate == 2


class WithLoss(nn.Module):
    """Puts the loss into its output, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, num_items_in_batch: int | None = None) -> dict[str, torch.Tensor]:
        output = self.net(x)
        loss = (
            output.pow(2).mean() if num_items_in_batch is None else output.pow(2).sum() / num_items_in_batch
        )
        self.losses.append(loss.item())
        return {"loss": loss, "logits": output}


def half_of_two(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        parts = [model(half)["loss"] for half in x.chunk(2)]
        for part in parts:
            part /= 2
        return torch.stack(parts).sum()

    return call


def test_the_losses_of_the_models_output(observer: Observer, heard: Heard) -> None:
    """As they were when the model gave them: what the script writes into them afterwards is its own."""
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + STEPS, 8, 16):
        half_of_two(model)(x).backward()
        optimizer.step()
    pairs = zip(model.losses[0::2], model.losses[1::2], strict=True)
    assert heard.facts.observed.losses == pytest.approx([(a + b) / 2 for a, b in pairs][WARMUP:])


def test_losses_that_are_shares_of_a_steps_loss(observer: Observer, heard: Heard) -> None:
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = torch.randn(WARMUP + STEPS, 8, 16)
    for x in batches:
        for half in x.chunk(2):
            model(half, num_items_in_batch=x.numel())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [model.net(x).pow(2).mean().item() for x in batches[WARMUP:]]
    assert heard.facts.observed.losses == pytest.approx(whole)


def test_a_loss_outside_of_the_models_output_is_not_seen(observer: Observer, heard: Heard) -> None:
    train(Net(), WARMUP + STEPS)
    assert heard.facts.observed.losses is None


def test_a_loss_that_is_no_number(observer: Observer, heard: Heard) -> None:
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(WARMUP + STEPS):
        x = torch.full((8, 16), float("nan") if step == WARMUP + 1 else 1.0)
        model(x)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = heard.facts.observed.losses
    assert losses is not None
    assert [each is None for each in losses] == [False, True, True]  # a rate of 0 times NaN is NaN


def test_no_graph_of_a_loss_is_kept_alive(observer: Observer) -> None:
    nodes = []

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            nodes.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    class Marked(WithLoss):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": Same.apply(super().forward(x)["loss"])}  # type: ignore[no-untyped-call]

    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(WARMUP + 1, 8, 16):
        model(x)["loss"].backward()
        optimizer.step()
    assert observer.window is not None
    assert [each() for each in nodes] == [None] * (WARMUP + 1)


def test_a_checkpointed_model_is_called_once(observer: Observer, heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = checkpoint(self.model, x, use_reentrant=False)
            return output

    train(Outer(), WARMUP + STEPS)
    assert heard.facts.observed.calls == 1


def test_a_model_inside_another_that_is_never_called(observer: Observer, heard: Heard) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

    outer = Outer()
    train(outer, WARMUP + STEPS, call=outer.model)
    assert heard.facts.network.kind.endswith(".Net")
    assert heard.facts.observed.calls == 1


def test_a_closure(observer: Observer, heard: Heard) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(8, 16)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(WARMUP + STEPS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    facts = heard.facts
    assert facts.workload.note is not None
    assert "closure" in facts.workload.note
    assert len(facts.observed.steps_ms) == STEPS


def test_steps_without_a_model(observer: Observer, heard: Heard) -> None:
    weight = nn.Parameter(torch.zeros(3))
    train(None, WARMUP + STEPS, call=lambda x: weight, optimizer=torch.optim.SGD([weight], lr=0.1))
    facts = heard.facts
    assert "no module" in facts.gaps["network"]
    assert len(facts.observed.steps_ms) == STEPS


@pytest.mark.usefixtures("forget_accelerate")
def test_a_trainer_that_fails_before_its_first_step(
    observer: Observer, heard: Heard, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As its script ends, what has overridden the launcher is told, and that prepare() had to fail."""
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "AO")
    arguments = TrainingArguments(str(tmp_path), bf16=True, use_cpu=True, max_steps=1, report_to=[])
    trainer = Trainer(Net(), arguments, train_dataset=Slow())
    with pytest.raises(AttributeError, match="'config'"):
        trainer.train()
    observer.failed()
    report = diagnose(heard.facts)
    (finding,) = (each for each in report.findings if each.code == "ENV001")
    assert finding.title.endswith("and TrainingArguments(bf16=True) made it bf16")
    assert "prepare() will fail: 'NoneType' object has no attribute 'config'" in finding.explanation
    assert [step.code for step in report.prescription] == ["ENV001"]
    assert answer(report).why[0].startswith("FP8 was asked for (ACCELERATE_MIXED_PRECISION=fp8)")
    assert "Not looked at" in text.render(report, verbose=True)


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, at: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.ones(16)


def test_waiting_for_data(observer: Observer, heard: Heard) -> None:
    model = Net()
    batches = iter(DataLoader(Slow(), batch_size=4))
    train(model, WARMUP + STEPS, call=lambda x: model(next(batches)))
    seen = heard.facts.observed
    assert seen.data_ms is not None
    assert seen.before_forward_ms is not None
    for wait, before, step in zip(seen.data_ms, seen.before_forward_ms, seen.steps_ms, strict=True):
        assert 8 <= wait <= before <= step
    assert DataLoader.__module__ in type(batches).__next__.__module__


def test_the_captured_gradient_trains_the_same(observer: Observer, heard: Heard, monkeypatch: Any) -> None:
    captured: list[Any] = []
    observer.settings = Settings("train.py", STEPS, WARMUP, stop=False, budget_s=1.0, device=None)
    whole = observer.examination.whole

    def keep(owner: Any, optimizer: Any, window: Any, *rest: Any, **named: Any) -> Any:
        captured.append(window.captured)
        return whole(owner, optimizer, window, *rest, **named)

    monkeypatch.setattr(observer.examination, "whole", keep)
    model, gradients = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(WARMUP + STEPS):
        batch = torch.randn(8, 16)
        nn.functional.cross_entropy(model(batch, scale=0.5), torch.arange(8)).backward()
        gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        batch.zero_()
    (capture,) = captured
    assert set(capture.batch) == {"x", "scale"}
    capture.loss()(model(**capture.batch), capture.batch).backward()
    for mine, theirs in zip(model.parameters(), gradients, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs)


def compiled(form: str) -> tuple[nn.Module, Any]:
    """A model that is compiled, and what the loop calls."""
    model: nn.Module = Net()
    if form == "wrapped":
        return model, torch.compile(model, backend="eager")
    if form == "in place":
        model.compile(backend="eager")
    elif form == "blocks":
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile(backend="eager")
    elif form == "slices its blocks":
        model.__class__ = Slicing
        return model, torch.compile(model, backend="eager")
    elif form == "wrapped, inside another":
        model = nn.Sequential(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    elif form == "assigned":
        model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model, model


@pytest.mark.parametrize(
    "form", ["wrapped", "in place", "blocks", "wrapped, inside another", "assigned", "slices its blocks"]
)
def test_nothing_is_compiled_again(form: str, observer: Observer, heard: Heard) -> None:
    torch._dynamo.reset()
    model, call = compiled(form)
    optimizer = train(model, 1, call=call)
    before = dict(counters["frames"]), sum(counters["recompiles"].values())
    train(model, WARMUP + STEPS + PROFILED + 1, call=call, optimizer=optimizer)
    assert (dict(counters["frames"]), sum(counters["recompiles"].values())) == before
    facts = heard.facts
    assert (facts.observed.calls, facts.observed.compiled) == (1, 0)
    assert facts.observed.graphs_run == (2 if form == "blocks" else 1)
    assert facts.workload.batch_size == 8
    assert facts.training.compile_marks


def test_a_compiled_function_is_left_alone(
    observer: Observer, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model's GPU keeps the time all the same."""
    torch._dynamo.reset()
    model = Net()
    devices: list[torch.device | None] = []
    monkeypatch.setattr(
        "fp8doctor.running.window.Clock", lambda device: devices.append(device) or Clock(device)
    )
    call = torch.compile(lambda x: model(x) * 2, backend="eager")
    optimizer = train(model, 1, call=call)
    before = counters["frames"]["total"]
    train(model, WARMUP + STEPS, call=call, optimizer=optimizer)
    assert counters["frames"]["total"] == before
    facts = heard.facts
    assert facts.observed.calls is None
    assert devices == [torch.device("cpu")]
    assert facts.workload.note is not None
    assert "a function of the script is compiled" in facts.workload.note


def test_the_window_waits_until_nothing_is_compiled(observer: Observer, heard: Heard) -> None:
    torch._dynamo.reset()
    model = Net()
    call = torch.compile(model, backend="eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in (2, 3, 4, 5, 5, 5, 5, 5):
        call(torch.randn(rows, 16)).sum().backward()
        optimizer.step()
    assert heard.facts.observed.compiled == 0
    assert heard.facts.observed.warmup == 5


def test_a_model_that_raises_in_the_window(observer: Observer) -> None:
    model = Net()
    optimizer = train(model, WARMUP + 1)
    assert ATTRIBUTE in vars(model)
    with pytest.raises(RuntimeError) as raised:
        model(torch.randn(8, 17))
    frames = [each.filename for each in traceback.extract_tb(raised.value.__traceback__)]
    assert not [each for each in frames if "fp8doctor/running" in each]
    train(model, STEPS, optimizer=optimizer)
    assert ATTRIBUTE not in vars(model)


def test_copies_and_pickles_of_a_model_in_the_window(observer: Observer) -> None:
    wrapped = nn.Sequential(Net())
    train(wrapped, WARMUP + 1)
    assert ATTRIBUTE in vars(wrapped)
    twin = copy.deepcopy(wrapped)
    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False), pickle.loads(pickle.dumps(wrapped))):
        assert vars(other).get(ATTRIBUTE) is None
        other(torch.randn(8, 16))


def test_the_model_is_not_kept_alive(observer: Observer) -> None:
    model = Net()
    alive = weakref.ref(model)
    train(model, WARMUP + STEPS)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_a_failure_of_ours_is_told_and_reaches_nobody(
    observer: Observer, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer.examination, "whole", lambda *_, **__: 1 / 0)
    model = Net()
    train(model, WARMUP + STEPS + 1)
    assert heard.notes == ["fp8doctor could not watch any further: ZeroDivisionError: division by zero"]
    assert ATTRIBUTE not in vars(model)


def test_stopping(observer: Observer) -> None:
    observer.settings = Settings("train.py", STEPS, WARMUP, stop=True, budget_s=None, device=None)
    with pytest.raises(SystemExit) as raised:
        train(Net(), 100)
    assert raised.value.code == 0


def test_nobody_owns_nothing() -> None:
    assert owner([], Living()) is None


@pytest.mark.parametrize("steps", [0, 1, WARMUP])
def test_a_model_that_is_frozen(observer: Observer, heard: Heard, steps: int) -> None:
    model = Net()
    optimizer = train(model, steps) if steps else None
    gc.freeze()
    try:
        train(model, WARMUP + STEPS, optimizer=optimizer)
    finally:
        gc.unfreeze()
    assert len(heard.facts.network.linears) == 4
    assert heard.facts.workload.batch_size == 8


def test_a_wrapped_model(observer: Observer, heard: Heard) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(DistributedDataParallel(Net()), WARMUP + STEPS)
    finally:
        dist.destroy_process_group()
    facts = heard.facts
    assert facts.observed.calls == 1
    assert len(facts.network.linears) == 4
    assert facts.workload.batch_size == 8


@pytest.mark.parametrize("original", [True, False])
def test_a_model_whose_parameters_are_flat(observer: Observer, heard: Heard, original: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(Net(), use_orig_params=original, device_id=torch.device("cpu"))
        train(model, WARMUP + STEPS)
    finally:
        dist.destroy_process_group()
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.observed.share_pct == 100
    assert facts.training.parameters_outside_optimizer == 0


def test_an_optimizer_of_deepspeed_that_steps_copies(observer: Observer, heard: Heard) -> None:
    model = Net()
    optimizer = ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert (facts.observed.calls, facts.observed.share_pct) == (1, 100)
    assert facts.workload.batch_source == "given"
    assert facts.training.optimizer == f"{ZeroOptimizer.__module__}.ZeroOptimizer"
    assert facts.training.optimizer_stepped
    assert facts.training.parameters_outside_optimizer == 0


def test_a_job_under_accelerate(observer: Observer, heard: Heard, forget_accelerate: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    rows = DataLoader(Slow(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), rows
    )
    for batch, _ in zip(loader, range(2 * (WARMUP + STEPS)), strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    facts = heard.facts
    assert (facts.observed.calls, facts.workload.accumulate) == (2, 2)
    assert facts.observed.data_ms is not None
    assert facts.training.accelerate is not None
    assert facts.training.accelerate.prepared
    assert facts.training.parameters_outside_optimizer == 0


def test_a_script_with_a_profiler_of_its_own(observer: Observer, heard: Heard) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(Net(), WARMUP + STEPS + 1)
    steps = [each for each in profiler.events() if each.name == "Optimizer.step#SGD.step"]
    assert len(steps) == WARMUP + STEPS + 1
    assert len(heard.facts.observed.steps_ms) == STEPS
    assert heard.notes == [f"no step was profiled: {ANOTHER_PROFILER}"]
    assert heard.facts.gaps["observed.breakdown"] == ANOTHER_PROFILER


def test_a_script_whose_profiler_warms_up(observer: Observer, heard: Heard) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=WARMUP + STEPS, active=2)
    model = Net()
    optimizer = train(model, 1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for _ in range(WARMUP + STEPS + 3):
            train(model, 1, optimizer=optimizer)
            profiler.step()
    assert len([each for each in profiler.events() if each.name == "Optimizer.step#SGD.step"]) == 2
    assert heard.notes == [f"no step was profiled: {ANOTHER_PROFILER}"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_script_that_starts_its_profiler_while_ours_is_there(
    steps: int, observer: Observer, heard: Heard
) -> None:
    model = Net()
    optimizer = train(model, WARMUP + STEPS + steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, 3, optimizer=optimizer)
    assert len([each for each in profiler.events() if each.name == "Optimizer.step#SGD.step"]) == 3
    assert heard.notes == [f"no step was profiled: {GAVE_WAY}"]
    assert observer.done


def test_a_script_that_ends_while_a_step_is_profiled(observer: Observer, heard: Heard) -> None:
    train(Net(), WARMUP + STEPS + 1)
    observer.closed()
    assert heard.notes == [f"no step was profiled: {CUT_SHORT}"]
    assert len(heard.facts.observed.steps_ms) == STEPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).sum()
    assert [each for each in profiler.events() if each.name == "aten::sum"]


def test_a_step_that_takes_too_long_to_be_profiled(
    observer: Observer, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8doctor.running.recording.LONGEST_MS", 0.0)
    train(Net(), WARMUP + STEPS)
    assert observer.done
    assert heard.notes == ["no step was profiled: a step takes 0 s, and its profile would be too large"]


def test_what_a_step_ran(observer: Observer, heard: Heard) -> None:
    train(Net(), WARMUP + STEPS + PROFILED)
    seen = heard.facts.observed
    assert (seen.fp8_gemms, seen.graphs_run, seen.host_copies_ms) == (0, 0, 0)
    gemms = [each for each in seen.breakdown.groups if each.family == "gemm_fp32"]
    assert sum(each.count for each in gemms) == 4 + 4 + 3  # the first layer's input needs no gradient


def test_an_optimizer_that_was_built_too_early(observer: Observer, heard: Heard) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.blocks[1].up = nn.Linear(16, 64)
    train(model, WARMUP + STEPS, optimizer=optimizer)
    assert heard.facts.training.parameters_outside_optimizer == 2
    assert heard.facts.training.first_outside_optimizer == ("blocks.1.up.weight", "blocks.1.up.bias")


def test_an_optimizer_whose_parameters_the_model_no_longer_has(observer: Observer, heard: Heard) -> None:
    """As after Accelerate's `prepare` with torchao: the norm is all that the optimizer still trains."""
    model = nn.Sequential(Net(), nn.LayerNorm(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        layer.weight, layer.bias = (nn.Parameter(each.detach()) for each in (layer.weight, layer.bias))
    train(model, WARMUP + STEPS, optimizer=optimizer)
    facts = heard.facts
    assert len(facts.network.linears) == 4
    assert facts.observed.share_pct < 1
    assert finding_of("MOD007", facts) is not None


def test_three_models_that_one_optimizer_trains_are_no_model(observer: Observer, heard: Heard) -> None:
    """None owns half, and all get gradients."""
    models = nn.ModuleList(Net() for _ in range(3))
    parts = [*models]
    optimizer = torch.optim.SGD([each for part in parts for each in part.parameters()], lr=0.01)
    del models
    train(parts, WARMUP + STEPS, call=lambda x: sum(part(x) for part in parts), optimizer=optimizer)
    assert not recorded(heard.facts, "network")


def test_steps_of_a_forked_process(observer: Observer, heard: Heard) -> None:
    heard.forked = True
    train(Net(), WARMUP + STEPS)
    assert heard.messages == [Stepped(forked=True)]


def test_two_optimizers_share_a_model(observer: Observer, heard: Heard) -> None:
    model = Net()
    both = [torch.optim.SGD(model.blocks[at].parameters(), lr=0.01) for at in (0, 1)]
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        for each in both:
            each.step()
            each.zero_grad()
    assert heard.facts.training.parameters_outside_optimizer == 0


class Work:
    """Stands in for the module ``time`` of the window's clock: it goes on where a script works."""

    def __init__(self) -> None:
        self.done_ms = 0.0

    def takes(self, ms: float) -> None:
        self.done_ms += ms

    def perf_counter(self) -> float:
        return self.done_ms / 1e3


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr("fp8doctor.running.clock.time", work)
    return work


def test_a_step_is_all_its_micro_batches(observer: Observer, heard: Heard, work: Work) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        for rows in (8, 8, 4):
            model(torch.randn(rows, 16)).pow(2).mean().backward()
            work.takes(10)
        work.takes(5)
        optimizer.step()
        optimizer.zero_grad()
    assert heard.facts.observed.steps_ms == pytest.approx((35,) * STEPS)
    assert heard.facts.workload.accumulate == 3


@pytest.mark.parametrize("steps_of_small", [1, 2])
def test_a_step_is_that_of_the_larger_of_two_models(
    steps_of_small: int, observer: Observer, heard: Heard, work: Work
) -> None:
    large, small = Net(3), Net(1)
    of_large = torch.optim.SGD(large.parameters(), lr=0.01)
    of_small = torch.optim.SGD(small.parameters(), lr=0.01)
    for _ in range(WARMUP + STEPS):
        for _ in range(steps_of_small):
            train(small, 1, optimizer=of_small)
            work.takes(7)
        train(large, 1, optimizer=of_large)
        work.takes(10)
    assert heard.facts.observed.steps_ms == pytest.approx((10 + 7 * steps_of_small,) * STEPS)
    assert len(heard.facts.network.linears) == 6


def test_two_optimizers_of_a_model_take_one_step(observer: Observer, heard: Heard, work: Work) -> None:
    model = Net()
    both = [torch.optim.SGD(model.blocks[at].parameters(), lr=0.01) for at in (0, 1)]
    for _ in range(WARMUP + STEPS):
        model(torch.randn(8, 16)).pow(2).mean().backward()
        for each in both:
            work.takes(6)
            each.step()
            each.zero_grad()
    assert heard.facts.observed.steps_ms == pytest.approx((12,) * STEPS)
    assert heard.facts.observed.calls == 1


def test_a_script_that_never_steps(observer: Observer, heard: Heard) -> None:
    Net()(torch.randn(8, 16)).sum().backward()
    assert observer.closed() == 0
    assert heard.messages == []


class Preempted(Exception):
    """What a script's own handler raises."""


def test_what_a_handler_of_the_script_raises_reaches_the_script(
    observer: Observer, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def preempt(number: int, frame: Any) -> None:
        raise Preempted

    note = observer.note

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        note(*arguments)

    monkeypatch.setattr(observer, "note", interrupted)
    before = signal.signal(signal.SIGUSR1, preempt)
    try:
        with pytest.raises(Preempted) as raised:
            train(Net(), 1)
        frames = [each.filename for each in traceback.extract_tb(raised.value.__traceback__)]
        assert not [each for each in frames if "fp8doctor/running" in each or "contextlib" in each]
        assert signal.getsignal(signal.SIGUSR1) is preempt
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard.notes == []
    assert len(heard.facts.network.linears) == 4


@pytest.mark.slow
def test_a_trial_before_the_stop(observer: Observer, heard: Heard) -> None:
    settings = Settings("train.py", STEPS, WARMUP, stop=True, budget_s=0.1, device="cpu")
    observer.settings = observer.examination.settings = settings
    with pytest.raises(SystemExit):
        train(Net(), 100)
    assert heard.facts.trial.device == "cpu"
    assert heard.notes == [f"the script was stopped after {WARMUP + STEPS + PROFILED} steps, as --stop asks"]


@pytest.mark.slow
def test_a_trial_of_a_model_whose_calls_and_autocast_were_not_seen(observer: Observer, heard: Heard) -> None:
    torch._dynamo.reset()
    settings = Settings("train.py", STEPS, WARMUP, stop=True, budget_s=0.1, device="cpu")
    observer.settings = observer.examination.settings = settings
    model = Net()
    with pytest.raises(SystemExit):
        train(model, 100, call=torch.compile(lambda x: model(x) * 2, backend="eager"))
    assert not recorded(heard.facts, "training.autocast")
    assert heard.facts.trial.reason.startswith("there is no batch to run it on")
    assert heard.notes == [f"the script was stopped after {WARMUP + STEPS + PROFILED} steps, as --stop asks"]
