"""A stand-in for the worker, an environment without settings, a saved report, and a folder of checks."""

import sys
from pathlib import Path

import pytest

from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.report import Report
from tests.cli.command import Worker
from tests.facts_of import DECODER_468M
from tests.profiling.composed import Composed

GRAVE_CHECK = '''
"""Something grave"""
from fp8doctor.finding import Finding
from fp8doctor.registry import check

@check("XYZ001", "grave", area="step", severity="error")
def grave(facts):
    return Finding(title="grave", explanation="It is grave.")
'''


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setitem(sys.modules, "fp8doctor.worker.parent", worker)
    return worker


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "LC_ALL", "LANG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    Report.of(diagnose(DECODER_468M)).save(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of two steps of 100 ms, 60 ms of each in an FP8 matmul."""
    composed = Composed()
    for number in range(2):
        begin = 100_000 * number
        composed.add("user_annotation", f"ProfilerStep#{number}", begin, begin + 100_000, 10)
        composed.kernel("nvjet_sm90_qqtst_1", begin + 10, begin + 60_010, launched=begin + 5)
    return composed.write(tmp_path, "trace.json")


@pytest.fixture
def grave_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of checks with one that always finds something; it is forgotten afterwards."""
    from fp8doctor import registry

    registry.discover()  # checks that are imported in between would be forgotten too
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))
    folder = tmp_path / "checks"
    folder.mkdir()
    (folder / "grave.py").write_text(GRAVE_CHECK)
    return str(folder)
