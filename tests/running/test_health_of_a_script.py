"""``fp8doctor run --health``: the script is as without it, and its file survives its death."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8doctor.health.record import read_health
from tests.running.jobs import PLAIN_LOOP
from tests.running.test_script import both, run, script, without_ours

KILLED = PLAIN_LOOP.replace(
    "            print(loss.item())", "            DIE\n            print(loss.item())"
).replace(
    "DIE", "if optimizer.state[optimizer.param_groups[0]['params'][0]]['step'] == 40: os.kill(os.getpid(), 9)"
)


@pytest.mark.slow
def test_the_script_prints_what_it_would_print(tmp_path: Path) -> None:
    arguments = [*script(tmp_path, PLAIN_LOOP), "--steps", "40"]
    plain, ours = both(arguments, tmp_path, "-q", "--health", "health", "--every", "4")
    assert ours[:2] == plain[:2]
    health = read_health(tmp_path / "health")
    assert health.steps == tuple(range(health.steps[0], 41, 4))
    assert len(health.steps) >= 5
    assert len(health.series()) == 6 * 3
    code, out, err = run(["-m", "fp8doctor", "health", "health"], tmp_path)
    assert (code, err) == (0, "")
    assert "FP8 is healthy in 6 layers" in out


@pytest.mark.slow
def test_a_killed_script_leaves_its_file_and_goes_on(tmp_path: Path) -> None:
    arguments = [*script(tmp_path, "import os\n" + KILLED), "--steps", "60"]
    ours = ["-m", "fp8doctor", "run", "-q", "--health", "health", "--every", "5"]
    code, _, _ = run([*ours, *arguments], tmp_path)
    assert code == -9
    before = read_health(tmp_path / "health")
    assert (before.torn, len(before.headers)) == (0, 1)
    assert 30 <= before.steps[-1] <= 40
    run([*ours, *arguments], tmp_path)
    assert len(read_health(tmp_path / "health").headers) == 2


@pytest.mark.slow
def test_it_stops_with_the_report_if_asked(tmp_path: Path) -> None:
    text = PLAIN_LOOP.replace("loss.backward()", "(loss if loss < 1.5 else loss * float('nan')).backward()")
    code, _, err = run(["-m", "fp8doctor", "run", "-q", "--stop-on-nan", *script(tmp_path, text)], tmp_path)
    assert code == 1
    assert "step 1: the loss is not finite." in err
    assert "Traceback" not in without_ours(err)
