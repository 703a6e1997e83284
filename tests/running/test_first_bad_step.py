"""The first loss or gradient that is not finite: the layer where it started, and the report that it leads."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.facts import recorded
from fp8doctor.running import losses
from fp8doctor.running.observer import ScriptObserver
from tests.running import loops
from tests.running.conftest import Heard
from tests.running.loops import Net, float8

pytestmark = pytest.mark.slow

BAD = 8
"""The step in which something goes wrong."""


def weight(model: Any, x: torch.Tensor) -> None:
    model.blocks[1].down.weight.data[0, 0] = math.nan


def overflow(model: Any, x: torch.Tensor) -> None:
    model.blocks[1].up.weight.data.fill_(3e38)


def gradient(model: Any, x: torch.Tensor) -> None:
    def spoil(found: torch.Tensor) -> torch.Tensor:
        found = found.clone()
        found.view(-1)[3] = math.nan
        return found

    def on_output(module: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(spoil)

    model.blocks[1].down.register_forward_hook(on_output)


def train(model: nn.Module, spoil: Callable[[Any, torch.Tensor], None] | None) -> int:
    """Train with clipping, which spreads what is not finite to all weights; return the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, 12):
        x = torch.randn(8, 16)
        if step == BAD and spoil is not None:
            spoil(model, x)
        try:
            model(x).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except SystemExit as stopped:
            return step if stopped.code == 1 else 0
        optimizer.zero_grad()
    return step


CASES = {
    weight: ("loss", "blocks.1.down", "weight"),
    overflow: ("loss", None, None),
    gradient: ("gradient", "blocks.1.down", "gradient of its weight"),
}
"""What is not finite, and the layer and tensor where it started."""


@pytest.mark.parametrize("spoil", CASES)
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_the_layer_is_named(kind: str, spoil: Any, observer: ScriptObserver, heard: Heard) -> None:
    model: Any = Net(3) if kind == "bf16" else float8()
    train(model, spoil)
    assert observer.long is not None
    observer.long.ended()
    said = [each.progress for each in heard.messages if each.progress is not None]
    assert said == [heard.notes[-1]]
    found = observer.long.found
    assert found is not None
    assert (found.step, found.what, found.layer, found.tensor) == (BAD, *CASES[spoil])
    assert found.fp8 is (None if found.layer is None else kind == "fp8")


@pytest.fixture
def stop_on_nan() -> bool:
    return True


@pytest.fixture(autouse=True)
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a millisecond would have their gradients read in some steps only."""
    monkeypatch.setattr(losses, "SHARE", math.inf)


@pytest.mark.parametrize(("spoil", "step"), [(overflow, BAD), (gradient, BAD + 1)])
def test_the_script_is_stopped_if_asked(spoil: Any, step: int, observer: ScriptObserver) -> None:
    assert observer.settings.stop_on_nan
    assert train(float8(), spoil) == step


def test_a_scaler_that_skips_its_first_steps_is_no_fault(observer: ScriptObserver, heard: Heard) -> None:
    model = Net(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    skipped = 0
    for _ in range(8):
        before = scaler.get_scale()
        scaler.scale((1e4 * model(torch.randn(8, 16))).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped += scaler.get_scale() < before
    assert skipped
    assert not any(each.progress for each in heard.messages)
    assert not any("not finite" in each for each in heard.notes)


LAST = 12
"""The window and its profile end before."""


@pytest.mark.parametrize(
    ("bad", "stop_on_nan"), [(1, False), (4, False), (LAST, True), (LAST, False), (None, False)]
)
def test_it_is_the_verdict_whenever_it_began(
    bad: int | None, stop_on_nan: bool, observer: ScriptObserver, heard: Heard
) -> None:
    """Only ``--stop-on-nan`` and ``--health`` watch to the script's end."""
    with suppress(SystemExit):
        steps = iter(range(1, LAST + 1))
        model = Net(2)
        loops.train(model, LAST, call=lambda x: model(x.fill_(math.inf if next(steps) == bad else 1.0)))
    observer.closed()
    report = diagnose(heard.facts)
    if bad is None or (bad == LAST and not stop_on_nan):
        assert not recorded(heard.facts, "not_finite")
        assert report.verdict.status != "not_finite"
    else:
        assert heard.facts.not_finite.step == bad
        assert (report.verdict.status, report.worst()) == ("not_finite", "error")
