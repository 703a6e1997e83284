"""A watched step shows what the worker's forward on fake tensors shows, and the autocasts of the script."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fp8doctor.analysis.compile_coverage import recomputed
from fp8doctor.analysis.fp8_request import lacks_autocast
from fp8doctor.facts import Facts, if_recorded, recorded
from fp8doctor.running.observer import ScriptObserver
from fp8doctor.trial.layers.seen_calls import IN_COMPILED_CODE
from tests.examine.models import called
from tests.examine.test_autocasts import Opening
from tests.examine.test_checkpointing import BATCH, OFF, ON, LikeTimm, Stack, flagged
from tests.running.conftest import PROFILED, STEPS, WARMUP, Heard
from tests.running.loops import Net
from tests.stand_ins import transformer_engine as te


def trained(model: Any, call: Callable[..., Any] | None = None, width: int = 16) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(WARMUP + STEPS):
        (call or model)(torch.ones(2, width)).sum().backward()
        optimizer.step()


def told(facts: Facts) -> Any:
    marks = [(each.name, each.form, each.active, each.reentrant) for each in facts.training.checkpointing]
    layers = {each.name: each.checkpointed for each in facts.linears()}
    return marks, layers, [if_recorded(recomputed, each, facts) for each in facts.network.blocks]


@pytest.mark.parametrize("build", [*ON.values(), *OFF.values()], ids=[*ON, *(f"{each}, off" for each in OFF)])
def test_checkpointing(build: Callable[[], nn.Module], observer: ScriptObserver, heard: Heard) -> None:
    trained(build())
    assert told(heard.facts) == told(called(build(), BATCH))


def test_rows(observer: ScriptObserver, heard: Heard) -> None:
    model = Stack()
    trained(model, lambda x: torch.stack([model(half) for half in x.split(1)]))
    assert set(heard.facts.workload.rows.values()) == {(1,)}
    assert set(heard.facts.workload.rows) == {each.name for each in heard.facts.linears()}


def test_an_autocast_of_transformer_engine_in_the_forward(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    te.install(monkeypatch)
    trained(nn.Sequential(Opening()), width=32)
    assert heard.facts.training.fp8_autocast is True


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = te.Linear(32, 32)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:
        output: torch.Tensor = self.layer(x, is_first_microbatch=is_first_microbatch)
        return output


@pytest.mark.parametrize("always", [True, False])
def test_what_micro_batches_tell_transformer_engine(
    observer: ScriptObserver, heard: Heard, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    te.install(monkeypatch)
    model = Telling()
    trained(
        model, lambda x: torch.stack([model(x, is_first_microbatch=at == 0 or always) for at in (0, 1)]), 32
    )
    assert heard.facts.training.first_microbatch == (True, always) * STEPS


@pytest.mark.slow
def test_compiled_code_hides_its_calls(observer: ScriptObserver, heard: Heard) -> None:
    model = flagged(LikeTimm())
    model.compile(backend="eager")
    trained(model)
    facts = heard.facts
    assert [each.active for each in facts.training.checkpointing] == [None]
    assert not any(recorded(each, "checkpointed") for each in facts.linears())
    assert facts.gaps["network.linears.checkpointed"] == IN_COMPILED_CODE
    assert not recorded(facts, "workload.rows")


@pytest.mark.slow
def test_what_is_around_compiled_blocks_is_seen(observer: ScriptObserver, heard: Heard) -> None:
    torch._dynamo.reset()
    model: Any = flagged(LikeTimm())
    for layer in model.layers:
        layer.compile(backend="eager")
    trained(model)
    facts = heard.facts
    assert [each.active for each in facts.training.checkpointing] == [True]
    assert [each.checkpointed for each in facts.linears()] == [None, *["layers.0"] * 2, *["layers.1"] * 2]


class Held(Net):
    """Its code does not name what it opens."""

    context = torch.autocast("cpu", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with self.context:
            return super().forward(x).float()


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), x)


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return plain(model, x)


def around_the_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse_loss(output, x)


@pytest.mark.parametrize(
    ("kind", "step", "dtype", "lacks"),
    [
        (Held, plain, "bfloat16", False),
        (Net, decorated, "bfloat16", False),
        (Net, around_the_loss, None, False),
        (Net, plain, None, True),
    ],
)
def test_an_autocast_of_a_watched_step(
    kind: type[Net], step: Any, dtype: str | None, lacks: bool, observer: ScriptObserver, heard: Heard
) -> None:
    model, own, x = kind(), torch.autocast.__enter__, torch.ones(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.autocast("cpu", enabled=False):  # opens none, and neither does an evaluation
        pass
    for _ in range(WARMUP + STEPS + PROFILED):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        step(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.autocast.__enter__ is own
    assert heard.facts.training.autocast == dtype
    assert lacks_autocast(heard.facts) is lacks
