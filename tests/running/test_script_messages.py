"""The channel from a script: whatever the script does to it, or to its reader, the script goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from fp8doctor.cli.run import what_was_not_seen
from fp8doctor.facts import Facts
from fp8doctor.running import script_messages
from fp8doctor.running.launch import checked_script
from fp8doctor.running.script_messages import Channel, Message, ScriptState


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    listen, tell = os.pipe()
    yield listen, tell
    for each in (listen, tell):
        with contextlib.suppress(OSError):
            os.close(each)


def test_a_message(pipe: tuple[int, int]) -> None:
    Channel(pipe[1]).send(Message(note="a\nb"))
    assert os.read(pipe[0], 100) == b'{"note":"a\\nb"}\n'


def test_a_reader_who_does_not_read(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_messages, "READER_TAKES_S", 0.01)
    channel = Channel(pipe[1])
    for _ in range(3):
        channel.send(Message(note="a" * 2**16))
    assert len(os.read(pipe[0], 2**20)) == 2**16


def test_another_file_in_its_place(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[1])
    other, theirs = os.pipe()
    os.dup2(theirs, pipe[1])
    channel.send(Message(note="a"))
    os.set_blocking(other, False)
    with pytest.raises(BlockingIOError):
        os.read(other, 1)
    for each in (other, theirs):
        os.close(each)


def test_a_line_that_was_broken_off(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    channel, write = Channel(pipe[1]), os.write

    def interrupted(number: int, data: bytes) -> int:
        write(number, data[:5])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            channel.send(Message(note="lost"))
    channel.send(Message(note="whole"))
    assert os.read(pipe[0], 200).split(b"\n")[1] == b'{"note":"whole"}'


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
