"""Helpers compile what they are told, and the trial waits for what is worth it."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import pytest

from tests.logged import Records
from tests.waiting import wait_for
from tests.worker.helping import BY_FACTS, CUTS, EVERY, LARGE, LOADED, WORK, helpers, named

pytestmark = pytest.mark.slow


def test_whoever_is_free_takes_the_next_work_and_tells_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=2)
    of.know(LARGE)
    assert of.begin(WORK, CUTS)
    wait_for("both arms to be compiled", lambda: not of.under_way())
    assert [of.took_s(arm) for arm in ("a", "b", "c")] == [4.0, 3.0, None]
    assert of.outcomes() == {"a": 4.0, "b": 3.0}
    assert [of.take(each, None) for each in WORK] == [3.0, 1.0, 3.0]
    assert of.end()
    assert not of.end()
    assert not of.begin(WORK, CUTS), "a trial that begins anew without them"
    assert of.outcomes() == {"a": 4.0, "b": 3.0}


def test_without_helpers_no_arm_was_to_be_compiled_beside_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY, count=0)
    assert not of.begin(WORK, CUTS)
    assert of.outcomes() == {}


def test_an_arm_that_was_compiled_at_one_cut_only_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "print(1 if json.loads(line)[1]['blocks'] == 2 else 'null', flush=True)"
    of = helpers(monkeypatch, f"{LOADED}\nfor line in sys.stdin: {answer}")
    of.begin(WORK, CUTS)
    (process,) = of._processes
    wait_for("its end", lambda: process.poll() is not None)
    assert [of.took_s(arm) for arm in ("a", "b")] == [None, None]
    assert [of.take(each, None) for each in WORK] == [None, 1.0, None]


def test_the_first_that_is_compiled_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, EVERY)
    assert of.wait_for_one(["a"], 0.0) == {"a"}, "nobody was asked for it"
    of.begin([("a", 0), ("b", 1)], CUTS)
    assert of.wait_for_one(["a", "b"], 300.0) >= {"a"}
    assert of.took_s("a") == 1.0
    assert of.wait_for_one(["b"], 300.0) == {"b"}


def test_what_nobody_has_done_by_then_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin(WORK, CUTS)
    assert of.wait_for_one(["a", "b"], 1e-2) == frozenset()
    wait_for("its first work", lambda: of.begun() == {"a"})
    assert of.under_way() == {"a", "b"}
    assert of.end()


def test_what_is_being_compiled_is_waited_for_and_what_is_not_is_left_to_the_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin(WORK, CUTS)
    wait_for("its first work", lambda: of.begun() == {"a"})
    assert of.take(("a", 0), None) is None
    assert of._waiting == [("b", 1)]
    assert of.take(("a", 1), 1e-3) is None, "it takes too long"
    threading.Timer(1e-2, of.end).start()
    assert of.take(("a", 1), None) is None, "it died"


def test_what_was_compiled_before_all_is_known_counts_where_it_is_planned_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = helpers(monkeypatch, BY_FACTS)
    (process,) = of._processes
    of.know(named("m"))
    assert of.begin([("a", 0), ("b", 0), ("gone", 0)], [None], more=True)
    wait_for("what is known", lambda: not of.under_way())
    of.know(named("mm"), {"a", "gone"})
    assert process.poll() is None, "it waits for more"
    assert of.under_way() == frozenset()
    assert of.begin([("c", 0), ("a", 0), ("b", 0)], [None])
    assert of.under_way() <= {"a", "c"}
    wait_for("its end", lambda: process.poll() is not None)
    assert of.outcomes() == {"c": 2, "a": 2, "b": 1}


@pytest.mark.parametrize("taken", [False, True])
def test_what_is_being_compiled_by_another_plan_is_not_waited_for_and_compiled_again(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the trial has come to it meanwhile."""
    held = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(1e-2)"
    of = helpers(monkeypatch, BY_FACTS.replace("print(len", f"exec({held!r}); print(len"))
    of.know(named("m"))
    of.begin([("a", 0), ("b", 0), ("c", 0)], [None], more=True)
    wait_for("its first work", lambda: of.begun() == {"a"})
    of.begin([("c", 0), ("b", 0), ("a", 0)], [None], more=True)
    assert of._waiting == [("c", 0), ("b", 0)], "in the new order, without what is being compiled"
    of.know(named("mm"), {"a", "b"})
    assert (of.begun(), of.under_way()) == (frozenset(), {"c"})
    if taken:
        assert of.take(("a", 0), None) is None
    of.begin([("a", 0), ("c", 0)], [None])
    assert of.under_way() == ({"c"} if taken else {"a", "c"})
    (tmp_path / "go").touch()
    wait_for("all of it", lambda: not of.under_way())
    assert of.outcomes() == {"a": None if taken else 2, "c": 2}


def test_what_was_begun_only_now_is_left_to_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of = helpers(monkeypatch, f"{LOADED}\nsys.stdin.readline(); import time; time.sleep(1e6)")
    of.begin([("a", 0)], CUTS)
    wait_for("its work", lambda: of.begun() == {"a"})
    of.pass_by("b", 1e6)
    of.pass_by("a", 0.0)
    assert of.begun() == {"a"}, "another arm, and one that was begun longer ago"
    of.pass_by("a", 1e6)
    assert not of.under_way()
    assert of.take(("a", 0), None) is None
    assert of.end()


def test_what_helpers_did_and_the_trial_waited_for_is_logged(
    monkeypatch: pytest.MonkeyPatch, logged: Records
) -> None:
    logging.getLogger("fp8doctor").setLevel(logging.DEBUG)
    of = helpers(monkeypatch, EVERY)
    of.begin(WORK, CUTS)
    assert of.wait_for_one(["b"], 300.0) == {"b"}
    of.take(("a", 1), None)
    of.take(("c", 1), None)
    wait_for("the last line", lambda: "compiled in 3.0 s ('b', 1)" in logged.text())
    for line in (
        r"a helper loaded the target, \d+\.\d s after it was told to load",
        r"a helper compiled in 1\.0 s \('a', 0\), \d+\.\d s after it was told to load",
        r"the trial waited \d+\.\d s for one of b: b",
        r"the trial waited 0\.0 s for \('a', 1\), which took 3\.0 s",
        r"the trial waited 0\.0 s for \('c', 1\), which is not compiled",
    ):
        assert re.search(line, logged.text()), line
