"""``tests/benchmarks/visits.py`` tells every place in a visit beside the run alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import visits
from tests.waiting import LONGEST_S

SCRIPT = Path(visits.__file__)


def test_a_place_is_held_to_the_run_alone() -> None:
    text = visits.table({"bf16": 10.0}, {"bf16": [[12.0, 10.0, 9.0], [11.0, 10.0, 9.0], [12.0, 10.2, 9.4]]})
    assert [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")] == [
        "bf16",
        "10.00 ms",
        "+20.0 %",
        "+0.0 %",
        "-10.0 %",
    ]


def test_each_variant_has_a_visit_a_round() -> None:
    ran: list[str] = []
    steps = {name: lambda name=name: ran.append(name) for name in ("a", "b")}
    found = visits.in_turns(steps, 3, 4)
    assert {name: [len(visit) for visit in each] for name, each in found.items()} == {
        "a": [3] * 4,
        "b": [3] * 4,
    }
    assert sorted(ran) == ["a"] * 12 + ["b"] * 12
    assert all(len(set(ran[start : start + 3])) == 1 for start in range(0, 24, 3))


@pytest.mark.slow
def test_a_tiny_run_prints_its_table() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "gpt_124m_whole", "bf16", "as_is", "--tiny", "--steps", "3"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=LONGEST_S,
    )
    *_, bf16, as_is = done.stdout.splitlines()
    assert (bf16.split("|")[1].strip(), as_is.split("|")[1].strip()) == ("bf16", "as_is")
    assert bf16.count("%") == as_is.count("%") == 3
