"""Files that are no trace of a GPU: what each is, in a sentence."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from itertools import islice
from pathlib import Path

import pytest

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling import trace as reader
from fp8doctor.profiling.users_trace import traced_step
from tests.profiling.composed import Composed

EVENT = {"ph": "X", "ts": 1, "dur": 2, "tid": 1}


def events(*named: tuple[str, str]) -> bytes:
    return json.dumps({"traceEvents": [{**EVENT, "cat": cat, "name": name} for cat, name in named]}).encode()


WHOLE = events(("kernel", "nvjet_sm90_qqtst"), ("cpu_op", "aten::mm"), ("kernel", "nvjet_sm90_tst"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it is empty"),
        (b"\n", "it is cut off after 1 byte; no kernel"),
        (b"PK\x03\x04rest", "it is a zip archive, not a trace"),
        (b"SQLite format 3\x00", "it is an SQLite database, as Nsight Systems exports one"),
        (b"\x80\x04\x95", "it is a pickle"),
        (b"step,loss\n1,2\n", "the trace is not JSON"),
        (WHOLE[:-40], "it is cut off after 228 bytes; 1 GPU kernel and 1 operator were seen up to there"),
        (b'{"traceEvents": [', "it is cut off after 17 bytes; no kernel and no operator of torch was seen"),
        (gzip.compress(WHOLE, mtime=0)[:-12], "the compressed file is cut off after"),
        (gzip.compress(WHOLE * 99, mtime=0)[:40] + b"??????", "its compression is damaged after"),
        (gzip.compress(b"[1, 2]", mtime=0), "it is a JSON list of 2 items, not a trace"),
        (b"[]", "it is a JSON list of 0 items"),
        (b"{}", "it has no traceEvents$"),
        (b'{"a": 1, "b": 2, "c": 3, "d": 4}', r"it has no traceEvents \(keys: a, b, c\)"),
        (b'{"schema_version": 1, "facts": {}}', "it is a report of fp8doctor, which 'fp8doctor report'"),
        (b'{"schema": "1.1.1", "nodes": []}', "it is an execution trace"),
        (b'{"traceEvents": 3}', "it is not a trace of torch.profiler: Expected `array`"),
        (b'{"traceEvents": []}', "it is a trace without a single event"),
        (
            events(("devtools.timeline", "Paint"), ("blink", "Layout")),
            r"it holds 2 events \(categories: devtools.timeline, blink\), none of which",
        ),
        (
            events(("cpu_op", "aten::mm"), ("cpu_op", "aten::mm")),
            "it holds 2 operators of a CPU and no work of a GPU; record it on the GPU with torch.profiler",
        ),
        (
            events(("cpu_op", "aten::mm")).replace(b"]}", b",")
            + json.dumps({**EVENT, "cat": "cuda_runtime", "args": {"correlation": 5}}).encode()
            + b"]}",
            "it holds 1 call of the CUDA runtime and no kernel: the profiler did not see the GPU",
        ),
    ],
)
def test_a_file_is_told_for_what_it_is(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableDocument, match=sentence):
        traced_step(path)


@pytest.mark.parametrize("step", range(0, len(WHOLE), 7))
def test_a_trace_that_is_cut_off_anywhere_is_refused(step: int, tmp_path: Path) -> None:
    for content in (WHOLE[:step], gzip.compress(WHOLE, mtime=0)[:step]):
        if gzip.compress(WHOLE, mtime=0) != content:
            (tmp_path / "trace.json").write_bytes(content)
            with pytest.raises(UnreadableDocument):
                traced_step(tmp_path / "trace.json")


def test_a_folder_names_the_traces_in_it(tmp_path: Path) -> None:
    with pytest.raises(UnreadableDocument, match=r"it is a folder without a \.json"):
        traced_step(tmp_path)
    for number in range(5):
        (tmp_path / f"host_{number}.pt.trace.json").touch()
    with pytest.raises(UnreadableDocument, match=r"host_0\.pt\.trace\.json, .*host_2.* and 2 more"):
        traced_step(tmp_path)


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UnreadableDocument, match="it is not a regular file"):
            traced_step(path)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_huge_trace_is_refused_with_what_to_do(
    compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Composed()
    for start in range(100):
        trace.kernel("nvjet_sm90_qqtst", start, start + 1)
    path = trace.write(tmp_path)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setattr(reader, "LARGEST_TRACE", 5000)
    with pytest.raises(UnreadableDocument, match="has more than 0 GiB; record fewer steps"):
        traced_step(path)


def bomb(begin: bytes = b'{"traceEvents": [') -> bytes:
    """So many spaces inside a trace that they pack into a thousandth."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    spaces = [packer.compress(b" " * 2**22) for _ in range(24)]
    return b"".join([packer.compress(begin), *spaces, packer.compress(b"]}"), packer.flush()])


@pytest.mark.slow
def test_a_small_file_that_grows_without_measure_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(bomb())
    with pytest.raises(UnreadableDocument, match=r"than 100 times its size.* unpack it with gunzip"):
        traced_step(path)
    few = islice(reader.unpacked(bomb()), 4)  # pieces of at most 16 MiB; there are 96 MiB
    with pytest.raises(reader.TooLarge):
        list(few)


@pytest.mark.slow
def test_a_bomb_behind_a_whole_trace_is_one_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(WHOLE, mtime=0) + bomb(b" "))
    with pytest.raises(UnreadableDocument, match="to more than 100 times its size"):
        traced_step(path)


@pytest.mark.parametrize("piece", [1, 7, 258, 1000, 2**24])
def test_pieces_of_any_size_are_the_whole(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_UNPACKED_PIECE", piece)
    content = WHOLE + b" " * 3000 + WHOLE
    packed = gzip.compress(content, mtime=0)
    assert b"".join(reader.unpacked(packed)) == content
    assert b"".join(reader.unpacked(packed + packed + bytes(9))) == content * 2
    with pytest.raises(EOFError):
        list(reader.unpacked(packed[:-9]))


def test_a_missing_or_forbidden_file_is_the_systems_answer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        traced_step(tmp_path / "none.json")
