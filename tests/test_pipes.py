"""The channel from a script: whatever the script does to it, or to its reader, the script goes on."""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from fp8doctor.pipes import Channel
from fp8doctor.running.attached import Attached
from fp8doctor.running.script_messages import Message, WatchOptions


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


def test_a_reader_who_does_not_read(pipe: tuple[int, int]) -> None:
    channel = Channel(pipe[1], 0.01)
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


@pytest.mark.parametrize("reused", [False, True])
def test_a_script_that_closed_all_files_ends_at_once(reused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    listen, tell = os.pipe()
    wait, reported = os.pipe()
    settings = WatchOptions("train.py", 3, 2, stop=False, budget_s=None, device=None)
    attached = Attached(Channel(tell), wait, settings)
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
