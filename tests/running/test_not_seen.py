"""What is said of a script that was seen less of than asked for."""

from __future__ import annotations

import pytest

from fp8doctor.cli.run import could_be_timed, no_trial, what_was_not_seen
from fp8doctor.facts import Facts, Observation, Trial
from fp8doctor.running.launch import checked_script
from fp8doctor.running.script_messages import ScriptState

END = " Its process ended without Python's own end: os._exit, exec, a signal or a crash."


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (ScriptState(Facts(), complete=True, torch=True, stepped=True), None),
        (ScriptState(ended=True), "nothing was seen: the script's process imported no torch."),
        (ScriptState(), "nothing was seen: the script's process imported no torch." + END),
        (
            ScriptState(Facts(), torch=True, stepped=True, ended=True, steps=3),
            "the script ended after 3 steps, before 15 were watched: the report is of what was seen until "
            "then.",
        ),
        (
            ScriptState(Facts(), torch=True, stepped=True),
            "the script ended before 15 steps were watched: the report is of what was seen until then." + END,
        ),
        (
            ScriptState(torch=True, stepped_in_fork=True, ended=True, steps=0),
            "no training step was seen: a process that it forked trains, and only the script's own process "
            "is watched.",
        ),
        (
            ScriptState(torch=True, ended=True, steps=0),
            "no training step was seen: no optimizer of torch took a step in the script's process. What it "
            "starts in processes of their own (launchers, spawn), optimizers of other libraries and a "
            "compiled optimizer.step are not seen; put 'fp8doctor run' in front of the command that trains.",
        ),
        (ScriptState(Facts(), torch=True, ended=True, steps=0, error="ValueError: the report says it"), None),
        (
            ScriptState(ended=True, steps=0, error="ValueError: no data"),
            "the script failed before it imported torch: ValueError: no data",
        ),
        (
            ScriptState(torch=True, ended=True, steps=0, error="FileNotFoundError: no such file: 'rows.bin'"),
            "no training step was seen: the script failed before its first, FileNotFoundError: no such file: "
            "'rows.bin'.",
        ),
    ],
)
def test_the_sentence(seen: ScriptState, said: str | None) -> None:
    assert what_was_not_seen(seen, 15) == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("facts", "could"),
    [
        (None, False),
        (Facts(), False),
        (Facts(observed=Observation(clock="host")), False),
        (Facts(observed=Observation(clock="cuda")), True),
        (Facts(observed=Observation(clock="cuda"), trial=Trial()), False),
    ],
)
def test_where_copies_could_have_been_timed(facts: Facts | None, could: bool) -> None:
    assert could_be_timed(facts) == could


def test_the_line_that_times_copies() -> None:
    assert no_trial("fp8doctor run --stop train.py").endswith(": fp8doctor run --stop train.py")


def test_notes_come_first() -> None:
    seen = ScriptState(
        Facts(), complete=True, notes=["the script was stopped after 15 steps, as --stop asks"]
    )
    assert what_was_not_seen(seen, 15) == seen.notes


def test_a_script_from_standard_input() -> None:
    assert checked_script(["-", "--lr", "1"]).command[-3:] == ["-", "--lr", "1"]
