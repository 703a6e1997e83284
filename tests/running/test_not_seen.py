"""What is said of a script that was seen less of than asked for."""

from __future__ import annotations

from fp8doctor.cli.run import what_was_not_seen
from fp8doctor.facts import Facts
from fp8doctor.running.launch import checked_script
from fp8doctor.running.script_messages import ScriptState

FINISHED = ScriptState(Facts(), complete=True, torch=True, stepped=True, ended=True)
FAILED = ScriptState(Facts(), torch=True, ended=True, steps=0, error="ValueError: the report says it")
SHORT = [
    ScriptState(ended=True),
    ScriptState(),
    ScriptState(Facts(), torch=True, stepped=True, ended=True, steps=3),
    ScriptState(Facts(), torch=True, stepped=True),
    ScriptState(torch=True, stepped_in_fork=True, ended=True, steps=0),
    ScriptState(torch=True, ended=True, steps=0),
    ScriptState(ended=True, steps=0, error="ValueError: no data"),
    ScriptState(torch=True, ended=True, steps=0, error="ValueError: no data"),
]


def test_each_way_to_see_less_has_a_sentence_of_its_own() -> None:
    assert what_was_not_seen(FINISHED, 15) == what_was_not_seen(FAILED, 15) == []
    said = [what_was_not_seen(each, 15) for each in SHORT]
    assert all(len(each) == 1 for each in said)
    assert len(set(map(tuple, said))) == len(SHORT)


def test_a_script_from_standard_input() -> None:
    assert checked_script(["-", "--lr", "1"]).command[-3:] == ["-", "--lr", "1"]
