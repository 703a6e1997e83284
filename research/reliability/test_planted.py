"""A planted violation for each guard of the kit: the kit can fail."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8doctor.examine
from fp8doctor.trial.state import settings
from fp8doctor.trial.state.guard import Guard
from research.reliability import command_lines, faults, growth, saved_reports, secrets, trees, trials

pytestmark = pytest.mark.filterwarnings("ignore")


def write_to_a_parameter(model: Any) -> None:
    with torch.no_grad():
        model[1].weight.add_(1)


LOOKS: dict[str, Callable[[Any], object]] = {
    "a write to a parameter": write_to_a_parameter,
    "a write past torch": lambda model: model[1].weight.detach().numpy().fill(0.0),
    "a gradient": lambda model: setattr(model[1].weight, "grad", torch.ones(8, 8)),
    "a new hook": lambda model: model[1].register_forward_hook(lambda *arguments: None),
    "an attribute": lambda model: setattr(model[1], "planted", 1),
    "a flag": lambda model: model[1].eval(),
    "random numbers of torch": lambda model: torch.rand(1),
    "random numbers of Python": lambda model: random.random(),
    "a property of the user's": lambda model: trees.RAN.append("weight"),
    "an exception": lambda model: 1 / 0,
}


@pytest.mark.parametrize("deed", LOOKS.values(), ids=LOOKS)
def test_a_look_that_does_harm_is_found(
    deed: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = fp8doctor.examine.examine

    def examine(job: Any) -> Any:
        deed(job.model)
        return honest(job)

    monkeypatch.setattr(fp8doctor.examine, "examine", examine)
    monkeypatch.setitem(trees.__dict__, "LEAVES", {"Linear": trees.LEAVES["Linear"]})
    monkeypatch.setitem(trees.__dict__, "AROUND", {"Sequential": trees.AROUND["Sequential"]})
    assert len(trees.looks(2).failures) == 2


def hostile(what: str) -> list[str]:
    """What a trial with this deed changed."""
    with trials.quick():
        return trials.trial_of("two layers", "AdamW", what, trials.DEEDS[what], False, True, {})


@pytest.mark.parametrize("what", ["trains the original", "averages in place"])
def test_a_trial_without_its_guard_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "armed", lambda guard: nullcontext())
    monkeypatch.setattr(Guard, "standing", lambda guard: nullcontext())
    assert any("changed" in each for each in hostile(what))


def test_a_trial_that_puts_nothing_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "put_back", lambda noted: [])
    assert any("changed" in each for each in hostile("hooks"))


def test_a_twin_that_trains_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = trials.inspected

    def inspected(world: trials.World, *arguments: Any, **options: Any) -> Any:
        torch.rand(1)
        return honest(world, *arguments, **options)

    monkeypatch.setattr(trials, "inspected", inspected)
    assert any("twin" in each for each in hostile("nothing"))


def test_harm_that_is_not_named_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.named(1).failures == []
    monkeypatch.setattr(Guard, "changed", lambda guard, before: [])
    assert len(trials.named(1).failures) == 1


@pytest.mark.parametrize(
    ("deed", "found"),
    [
        ("printf '{' >kept.json", "kept.json is torn"),
        ("touch .fp8doctor-1", ".fp8doctor-1 is left"),
        ("echo internal error", "internal error"),
        ("exit 3", "exit code 3"),
        ("sleep 60 >/dev/null 2>&1 &", "a process is left"),
    ],
)
def test_a_fault_that_costs_more_is_found(
    deed: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "PATIENCE_S", 0.2)
    (why,) = faults.carried_out(faults.Fault(f"true fp8doctor ; {deed}"), tmp_path, random.Random(0))
    assert found in why


def test_a_damaged_report_that_crashes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8doctor.diagnosis import document

    monkeypatch.setattr(document, "contradiction", lambda facts: None)
    saved = saved_reports.recorded()["h200-lora_fp32"]
    saved["facts"]["trial"]["arms"][0]["cuts"] = []
    monkeypatch.setattr(saved_reports, "recorded", lambda: {"without cuts": saved})
    assert len(saved_reports.deletions(tmp_path, most=2).failures) == 1


def test_a_command_that_raises_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8doctor.cli import pages

    monkeypatch.setattr(pages, "replay_and_deliver", lambda saved, options: 1 / 0)
    assert command_lines.command_lines(150, tmp_path).failures


def test_a_secret_that_survives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "scrub", str)
    count = secrets.scrubbed()
    assert len(count.failures) == count.tried


def start_a_thread(left: list[Any]) -> None:
    left.append(threading.Event())
    threading.Thread(target=left[-1].wait, daemon=True).start()


GROWTHS: dict[str, Callable[[list[Any]], object]] = {
    "objects": lambda left: left.extend([each] for each in range(100)),
    "memory": lambda left: left.append(b"x" * 2**24),
    "threads": start_a_thread,
    "open files": lambda left: left.append(os.fdopen(os.open(os.devnull, os.O_RDONLY))),
}


@pytest.mark.parametrize("what", GROWTHS)
def test_what_grows_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    monkeypatch.setattr(growth, "inspected", lambda trial: GROWTHS[what](left))
    found = growth.growth(5, trial=False).failures
    for each in left:
        if isinstance(each, threading.Event):
            each.set()
        elif hasattr(each, "close"):
            each.close()
    assert any(each.startswith(what) for each in found)
