"""Files that are no trace of a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling import trace as reader
from fp8doctor.profiling.users_trace import traced_step
from tests.profiling.composed import Composed

EVENT = {"ph": "X", "ts": 1, "dur": 2, "tid": 1}


def events(*categories: str) -> bytes:
    told = [{**EVENT, "cat": each, "name": "any", "args": {"correlation": 5}} for each in categories]
    return json.dumps({"traceEvents": told}).encode()


WHOLE = events("kernel", "cpu_op", "kernel")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"SQLite format 3\x00", "the trace is not JSON"),
        (b'{"schema_version": 1, "facts": {}}', "it is not a trace of torch.profiler"),
        (b'{"traceEvents": []}', "it holds no work of a GPU; record it on the GPU"),
        (events("cpu_op", "cpu_op"), "it holds no work of a GPU; record it on the GPU"),
        (events("cpu_op", "cuda_runtime"), "no kernel: the profiler did not see the GPU"),
    ],
)
def test_what_holds_no_work_of_a_gpu_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
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
