"""What stands in the script's process before torch does."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor.running.attached import PythonsOwn, _Attached
from fp8doctor.running.script_messages import Channel, WatchOptions


def test_a_file_of_the_script_has_the_name_of_a_module_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "colorsys"
    monkeypatch.delitem(sys.modules, name, raising=False)
    own = PythonsOwn([name])
    assert name not in sys.modules
    (tmp_path / f"{name}.py").write_text("mine = True")
    monkeypatch.syspath_prepend(tmp_path)
    with own:
        assert not hasattr(importlib.import_module(name), "mine")
    assert importlib.import_module(name).mine
    with own:
        assert not hasattr(importlib.import_module(name), "mine")
    assert sys.modules.pop(name).mine


@pytest.mark.parametrize("reused", [False, True])
def test_a_script_that_closed_all_files_ends_at_once(reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    listen, tell = os.pipe()
    wait, reported = os.pipe()
    settings = WatchOptions("train.py", 3, 2, stop=False, budget_s=None, device=None)
    attached = _Attached(Channel(tell), wait, settings)
    os.close(wait)
    silent = os.pipe()
    if reused:
        os.dup2(silent[0], wait)
    waits: list[object] = []
    waiting = SimpleNamespace(select=lambda *given: waits.append(given))
    monkeypatch.setattr("fp8doctor.running.attached.select", waiting)
    attached.ended()
    assert not waits
    for each in {listen, tell, reported, *silent, *([wait] if reused else [])}:
        os.close(each)
