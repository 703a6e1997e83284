"""The host over a window, from a ``/proc`` and a cgroup that are written down."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8doctor.facts import Trial, recorded
from fp8doctor.trial.measure import observers
from fp8doctor.trial.measure.observers import HostObserver
from tests.waiting import wait_for

TICKS = os.sysconf("SC_CLK_TCK")

Write = Callable[..., None]


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Two cores of four, of which the second is named too by what the process may use."""
    monkeypatch.setattr(observers, "PROC", tmp_path)
    monkeypatch.setattr(observers, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(observers, "own_cores", lambda: {0, 1})
    (tmp_path / "cgroup" / "job").mkdir(parents=True)
    (tmp_path / "self" / "task" / "7").mkdir(parents=True)
    (tmp_path / "self" / "cgroup").write_text("3:cpuset:/\n0::/job\n")

    def write(
        *,
        user: float,
        idle: float,
        steal: float = 0.0,
        own: float = 0.0,
        waited_s: float = 0.0,
        quota: str = "",
    ) -> None:
        core = f"{user * TICKS / 2:.0f} 0 0 {idle * TICKS / 2:.0f} 0 0 0 {steal * TICKS / 2:.0f} 0 0"
        of_others = "999999 0 0 0 0 0 0 0 0 0"
        cores = [core, core, of_others, of_others]
        lines = [f"cpu  {of_others}", *(f"cpu{number} {each}" for number, each in enumerate(cores))]
        (tmp_path / "stat").write_text("\n".join([*lines, "intr 1 2 3"]))
        (tmp_path / "self" / "task" / "7" / "schedstat").write_text(f"5 {waited_s * 1e9:.0f} 3\n")
        (tmp_path / "cgroup" / "job" / "cpu.stat").write_text(quota)
        used = SimpleNamespace(user=own, system=0.0, children_user=0.0, children_system=0.0)
        monkeypatch.setattr(observers, "os", SimpleNamespace(**{**vars(os), "times": lambda: used}))

    return write


def at(clock_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        observers, "time", SimpleNamespace(monotonic=lambda: clock_s, perf_counter=lambda: clock_s)
    )


def test_a_window_is_what_was_counted_between_its_ends(linux: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = HostObserver()
    linux(user=100.0, idle=100.0, own=3.0, waited_s=1.0, quota="nr_periods 10\nnr_throttled 1\n")
    at(0.0, monkeypatch)
    with observer.window():
        observer.look()
        at(10.0, monkeypatch)
        linux(
            user=115.0,
            idle=104.0,
            steal=1.0,
            own=8.0,
            waited_s=2.5,
            quota="nr_periods 110\nnr_throttled 26\n",
        )
    load = observer.load()
    assert (load.window_s, load.cores) == (10.0, 2)
    assert (load.others_pct, load.steal_pct) == (pytest.approx(50.0), pytest.approx(5.0))
    assert (load.waited_pct, load.throttled_pct) == (pytest.approx(15.0), pytest.approx(25.0))


def test_windows_are_summed_up_and_without_a_quota_none_is_used_up(
    linux: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = HostObserver()
    for number in range(2):
        linux(user=10.0 * number, idle=0.0)
        at(10.0 * number, monkeypatch)
        with observer.window():
            observer.look()
            linux(user=10.0 * number + 1.0, idle=1.0)
            at(10.0 * number + 1, monkeypatch)
    load = observer.load()
    assert (load.window_s, load.others_pct, load.throttled_pct) == (2.0, pytest.approx(50.0), None)
    assert len(observer.paces_ms) == 2


def test_a_system_that_tells_nothing_leaves_it_unrecorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(observers, "PROC", tmp_path / "absent")
    observer = HostObserver()
    with observer.window():
        observer.look()
    assert not recorded(Trial(host=observer.load()), "host")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux tells it")
def test_a_real_window_is_told() -> None:
    observer = HostObserver()

    def later() -> bool:
        observer.look()
        now = observers.counters()
        return now is not None and before is not None and now.total > before.total

    with observer.window():
        before = observers.counters()
        wait_for("the clock of the kernel's counters to tick", later)
    load = observer.load()
    assert 0 < load.pace_low_ms <= load.pace_median_ms
    assert 0 <= load.others_pct <= 100
    assert load.cores == len(observers.own_cores()) >= 1
