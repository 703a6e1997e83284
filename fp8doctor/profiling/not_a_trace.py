"""Explain a file that cannot be read as a trace of a GPU."""

from __future__ import annotations

import os
import re
import stat
import zlib
from pathlib import Path

import msgspec

from fp8doctor.facts.record import UnreadableDocument
from fp8doctor.profiling.trace import TooLarge, Trace, read_trace, unpacked
from fp8doctor.wording import plural, quoted

_KERNEL = re.compile(rb'"cat": ?"kernel"')
_OPERATOR = re.compile(rb'"cat": ?"cpu_op"')

_SHOWN = 3
"""Names of files, keys or categories to show."""

_OTHERS = {
    b"SQLite format 3": "it is an SQLite database, as Nsight Systems exports one",
    b"PK\x03\x04": "it is a zip archive",
    b"\x80": "it is a pickle, as torch.cuda.memory writes its snapshots",
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd",
}
"""First bytes of other kinds of files."""

_RECORD = "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"


def read_or_explain(path: Path) -> Trace:
    """Read a trace with GPU work, or raise an error that says what the file holds.

    Raises `fp8doctor.facts.record.UnreadableDocument`; OSError if the file cannot be read.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise UnreadableDocument(f"it is a folder{_traces_in(path)}")
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableDocument("it is not a regular file")
    with path.open("rb"):
        pass
    try:
        trace = read_trace(path)
    except TooLarge:
        raise
    except UnreadableDocument as error:
        raise UnreadableDocument(_explained(path, str(error)) or str(error)) from None
    if trace.gpu:
        return trace
    raise UnreadableDocument(_without_gpu(trace))


def _traces_in(folder: Path) -> str:
    names = sorted(name for name in os.listdir(folder) if name.endswith((".json", ".json.gz")))
    if not names:
        return " without a .json or .json.gz in it"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; name one of the files in it: {', '.join(names[:_SHOWN])}{more}"


def _without_gpu(trace: Trace) -> str:
    """Describe a trace without GPU work."""
    if trace.launches:
        return (
            f"it holds {plural(len(trace.launches), 'call')} of the CUDA runtime and no kernel: the profiler "
            "did not see the GPU (CUPTI could not be used, or another profiler had it)"
        )
    operators = trace.categories.get("cpu_op", 0)
    if operators:
        return (
            f"it holds {plural(operators, 'operator')} of a CPU and no work of a GPU; record it on the GPU "
            f"with {_RECORD}"
        )
    known = [name for name in trace.categories if name]
    events = sum(trace.categories.values())
    if not events:
        return "it is a trace without a single event: nothing ran while the profiler recorded"
    named = f" (categories: {', '.join(known[:_SHOWN])})" if known else ""
    return quoted(
        f"it holds {plural(events, 'event')}{named}, none of which is an operator or work of a GPU as "
        "torch.profiler writes them"
    )


def _explained(path: Path, error: str) -> str | None:
    """Describe a file that is no complete trace; None if the error says enough."""
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        return "it is empty"
    for beginning, sentence in _OTHERS.items():
        if start.startswith(beginning):
            return f"{sentence}, not a trace of torch.profiler"
    content, whole = bytearray(), True
    try:
        for piece in unpacked(path.read_bytes()) if start.startswith(b"\x1f\x8b") else (path.read_bytes(),):
            content += piece
    except EOFError:
        whole = False
    except zlib.error:
        return f"its compression is damaged after {_megabytes(len(content))}; {_counted(content)}"
    if not whole:
        return f"the compressed file is cut off after {_megabytes(len(content))} of JSON; {_counted(content)}"
    if "truncated" in error:
        return f"it is cut off after {_megabytes(len(content))}; {_counted(content)}"
    return _by_its_keys(content)


def _counted(content: bytearray) -> str:
    """Describe the contents of an incomplete file."""
    kernels, operators = len(_KERNEL.findall(content)), len(_OPERATOR.findall(content))
    if not kernels + operators:
        return "no kernel and no operator of torch was seen in it"
    seen = f"{plural(kernels, 'GPU kernel')} and {plural(operators, 'operator')}"
    return f"{seen} were seen up to there, and none was counted"


def _by_its_keys(content: bytearray) -> str | None:
    """Describe other JSON; None for a trace with one wrong event, or no JSON."""
    try:
        document = msgspec.json.decode(content, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(document, list):
        return f"it is a JSON list of {plural(len(document), 'item')}, not a trace of torch.profiler"
    if "traceEvents" in document:
        return None
    if {"schema_version", "facts"} <= document.keys():
        return "it is a report of fp8doctor, which 'fp8doctor report' and 'fp8doctor compare' read"
    if "nodes" in document:
        return "it is an execution trace (ExecutionTraceObserver), which holds no times"
    keys = f" (keys: {', '.join(list(document)[:_SHOWN])})" if document else ""
    return quoted(f"it is JSON, but not a trace of torch.profiler: it has no traceEvents{keys}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else plural(size, "byte")
