"""Read a trace that ``torch.profiler`` exported.

Format: ``libkineto/src/output_json.cpp`` of pytorch/kineto, and traces of torch 2.13 on a CPU. One JSON
object with ``traceEvents``, by ``cat``: ``cpu_op`` and ``user_annotation`` (host), ``cuda_runtime`` and
``cuda_driver`` (launching calls), ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` (GPU). ``ts`` and ``dur`` are
microseconds with three decimals. A GPU event and its launch share ``correlation``; both have the ``External
id`` of the innermost open operator, if any. ``gpu_user_annotation`` and ``cuda_sync`` are on the GPU's rows
and are no work.
"""

from __future__ import annotations

import gc
import gzip
import mmap
import stat
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import lt
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fp8doctor.facts.record import UnreadableDocument, decoder

MODULE = "fp8doctor module "
"""Prefix of an annotation around a module's call: ``fp8doctor module <kind> <name>``, without name for the
root."""

LARGEST_TRACE = 4 * 2**30
"""Most bytes of JSON, which take twice the memory; an uncompiled FP8 step of 468M parameters has 0.17 GB."""

_GZIP = b"\x1f\x8b"
_PIECE = 2**24
"""Bytes to unpack at once."""

_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})
_COMPILING = "(dynamo_timed)"
"""Suffix of torch.compile's events, since torch 2.4."""

LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    external: int = msgspec.field(name="External id", default=0)
    correlation: int = 0
    device: int = -1
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    types: tuple[str, ...] = msgspec.field(name="Input type", default=())


_Time = Annotated[float, msgspec.Meta(ge=-1e20, le=1e20)]
"""Microseconds that are finite in nanoseconds."""


class Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    ts: _Time = 0.0
    dur: _Time = 0.0
    tid: int | str = 0
    id: int | str = 0
    bp: str = ""
    """Only at the end of a link."""
    args: _Arguments = _Arguments()


class _Document(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")
    devices: Any = msgspec.field(name="deviceProperties", default=None)
    distributed: Any = msgspec.field(name="distributedInfo", default=None)


Thread = int | str
"""The system's number, unique over all processes."""


@dataclass(frozen=True)
class Trace:
    """The events of a trace that a step needs."""

    gpu: list[Event]
    host: dict[Thread, list[Event]]
    launches: dict[int, Event]
    """Correlation -> call."""
    links: list[Event]
    """From a forward operator to its backward node, an event at each end."""
    annotations: list[Event] = field(default_factory=list)
    """The host's, also in ``host``."""
    compiling: list[Event] = field(default_factory=list)
    """torch.compile's events, also in ``host``."""
    gpus: dict[int, str] = field(default_factory=dict)
    """Number -> name of the machine's GPUs, if recorded."""
    rank: int | None = None
    world_size: int | None = None
    with_stack: bool = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, which would scan live events repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_gpu_trace(path: Path) -> Trace:
    """Read a trace with work of a GPU.

    Raises `fp8doctor.facts.record.UnreadableDocument`; OSError if the file cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableDocument("it is not a file; name a trace (.json or .json.gz)")
    with path.open("rb"):
        pass
    trace = read_trace(path)
    if trace.gpu:
        return trace
    if trace.launches:
        raise UnreadableDocument(
            "it holds calls of the CUDA runtime and no kernel: the profiler did not see the GPU (CUPTI could "
            "not be used, or another profiler had it)"
        )
    raise UnreadableDocument(
        "it holds no work of a GPU; record it on the GPU with "
        "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])"
    )


@collector_paused()
def read_trace(path: Path) -> Trace:
    """Read a trace, plain or gzip. Raises `fp8doctor.facts.record.UnreadableDocument`."""
    try:
        size = Path(path).stat().st_size
        if not size:
            raise UnreadableDocument("the trace is empty")
        if size > LARGEST_TRACE:
            raise UnreadableDocument(too_large("the trace"))
        with (
            open(path, "rb") as file,
            mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0),
                prot=mmap.PROT_READ,
            ) as content,
        ):
            document = decoder(_Document).decode(unpacked(path) if content[:2] == _GZIP else content)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"the trace cannot be read: {error}") from None
    except msgspec.ValidationError as error:
        raise UnreadableDocument(f"it is not a trace of torch.profiler: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableDocument(f"the trace is not JSON ({error})") from None
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in document.events:
        by_category[event.cat].append(event)
    return Trace(
        gpu=list(chain.from_iterable(by_category[category] for category in _GPU)),
        host=_by_thread(chain.from_iterable(by_category[category] for category in _HOST)),
        launches={
            event.args.correlation: event
            for category in LAUNCHES
            for event in by_category[category]
            if event.args.correlation
        },
        links=by_category["fwdbwd"],
        annotations=by_category["user_annotation"],
        compiling=[event for event in by_category["cpu_op"] if event.name.endswith(_COMPILING)],
        gpus=_names_of_gpus(document.devices),
        rank=_number(document.distributed, "rank"),
        world_size=_number(document.distributed, "world_size"),
        with_stack="python_function" in by_category,
    )


def unpacked(path: Path) -> bytearray:
    """Unpack a compressed trace. Raises OSError, EOFError, zlib.error or `UnreadableDocument`."""
    content = bytearray()
    with gzip.open(path) as file:
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > LARGEST_TRACE:
                raise UnreadableDocument(too_large("unpacked, the trace"))
    return content


def too_large(what: str) -> str:
    return (
        f"{what} has more than {LARGEST_TRACE >> 30} GiB; record fewer steps "
        "(schedule=torch.profiler.schedule(wait=2, warmup=2, active=3)) without with_stack"
    )


def _names_of_gpus(devices: Any) -> dict[int, str]:
    described = [each for each in devices if isinstance(each, dict)] if isinstance(devices, list) else []
    return {
        number: each["name"]
        for each in described
        if (number := _number(each, "id")) is not None and isinstance(each.get("name"), str) and each["name"]
    }


def _number(described: Any, key: str) -> int | None:
    found = described.get(key) if isinstance(described, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _by_thread(events: Iterable[Event]) -> dict[Thread, list[Event]]:
    threads: dict[Thread, list[Event]] = defaultdict(list)
    for event in events:
        threads[event.tid].append(event)
    return threads


def in_order(events: list[Event], order: Callable[[Event], tuple[Any, ...]]) -> list[Event]:
    starts = [event.ts for event in events]
    return events if all(map(lt, starts, islice(starts, 1, None))) else sorted(events, key=order)


def outer_first(event: Event) -> tuple[float, float]:
    """Order by start, and enclosing events first."""
    return event.ts, -event.dur
