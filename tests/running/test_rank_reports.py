"""Several processes of one job: what their listeners tell each other, and what is said of them."""

import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Observation
from fp8doctor.running import rank_reports
from fp8doctor.running.rank_reports import RankPlace, RankReports, rank_place
from fp8doctor.running.script_messages import ScriptState

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def placed(**changes: str) -> RankPlace:
    place = rank_place({**TORCHRUN, **changes})
    assert place is not None
    return place


def test_a_process_knows_where_it_stands() -> None:
    place = placed()
    assert (place.rank, place.world_size, place.of_host) == (1, 4, 2)
    assert placed(RANK="0", LOCAL_RANK="0") == RankPlace(0, 4, 2, place.folder)
    for other in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert placed(**{other: "7"}).folder != place.folder
    for alone in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "all"}):
        assert rank_place(alone) is None
    with pytest.raises(UserError, match="WORLD_SIZE is 8 and RANK is not set"):
        rank_place({"WORLD_SIZE": "8"})


def test_the_lines_for_slurm_say_where_a_process_stands() -> None:
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text("utf-8")
    lines = page.split("<!-- example: srun -->")[1].split("```")[1]
    task = re.search(r"srun (bash -c '.*?)exec python", lines, re.S)
    assert task
    slurm = {
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "16",
        "SLURM_NTASKS_PER_NODE": "8",
        "PATH": os.environ["PATH"],
    }
    told = subprocess.run(
        ["bash", "-c", f"{task[1]} env'"], env=slurm, capture_output=True, text=True, check=True, timeout=60
    )
    place = rank_place(dict(line.split("=", 1) for line in told.stdout.splitlines() if "=" in line))
    assert place is not None
    assert (place.rank, place.world_size, place.of_host) == (9, 16, 8)


def watched(ms: float) -> Facts:
    return Facts(observed=Observation(steps_ms=(ms,) * 3, data_ms=None, before_forward_ms=(1.0,) * 3))


def ended(ms: float = 3.0) -> ScriptState:
    return ScriptState(watched(ms), complete=True, ended=True)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RankPlace]:
    """Three ranks of one host, and a rank 0 that does not wait."""
    monkeypatch.setattr(rank_reports, "OTHERS_END_WITHIN_S", 0.1)
    return [RankPlace(number, 3, 3, tmp_path / "met") for number in range(3)]


def ends(seen: ScriptState) -> dict[int, str]:
    assert seen.ranks is not None
    return {each.rank: each.end for each in seen.ranks.processes}


def test_rank_0_may_end_first(places: list[RankPlace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reports, "OTHERS_END_WITHIN_S", 60.0)
    others = [
        threading.Thread(target=RankReports(place).ended, args=(ended(),), kwargs={"patient": False})
        for place in places[1:]
    ]
    gathering, own = RankReports(places[0]), ended()
    for each in others:
        each.start()
    gathering.ended(own, patient=False)
    for each in others:
        each.join(60.0)
    assert ends(own) == {0: "ended", 1: "ended", 2: "ended"}
    assert own.ranks is not None
    assert [each.observed.steps_ms for each in own.ranks.processes] == [(3.0, 3.0, 3.0)] * 3


def test_nobody_is_waited_for_for_ever(places: list[RankPlace]) -> None:
    gathering, telling = RankReports(places[0]), RankReports(places[1])
    telling.changed(ScriptState(watched(10.0), running=True))
    own = ended()
    gathering.ended(own, patient=False)
    assert ends(own) == {0: "ended", 1: "running", 2: "not_seen"}
    telling.ended(ScriptState(ended=True), patient=False)  # there is nobody any more
    assert not places[0].folder.exists()


def test_a_listener_that_is_gone_counts_as_killed(places: list[RankPlace]) -> None:
    gathering = RankReports(places[0])
    if not os.fork():
        RankReports(places[1]).changed(ScriptState(watched(10.0), running=True))
        os._exit(0)
    os.wait()
    own = ended()
    gathering.ended(own, patient=False)
    assert ends(own)[1] == "killed"


def test_a_gate_waits_for_ranks_that_still_run(places: list[RankPlace]) -> None:
    gathering, telling = RankReports(places[0]), RankReports(places[1])
    telling.changed(ScriptState(watched(10.0), running=True))
    own = ended()
    waits = threading.Thread(target=gathering.ended, args=(own,), kwargs={"patient": True})
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()
    telling.ended(ended(10.0), patient=False)
    waits.join(60.0)
    assert ends(own) == {0: "ended", 1: "ended", 2: "not_seen"}


@pytest.mark.parametrize("others", [False, True])
def test_what_is_no_rank_is_not_heard(others: bool, places: list[RankPlace]) -> None:
    """A torn file, what a killed job left, and a folder that others may write to."""
    RankReports(places[0])
    RankReports(places[2]).changed(ended())
    gathering = RankReports(places[0])  # the first one was killed
    (places[0].folder / "1").write_text('{"rank": {"rank": 1, "end": "ended"}, "at_s"')
    if others:
        places[0].folder.chmod(0o777)
        RankReports(places[1]).changed(ended())
    own = ended()
    gathering.ended(own, patient=False)
    assert ends(own) == {0: "ended", 1: "not_seen", 2: "not_seen"}
    assert places[0].folder.exists() is others
