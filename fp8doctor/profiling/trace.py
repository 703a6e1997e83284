"""Read a trace that ``torch.profiler`` exported (``libkineto/src/output_json.cpp`` of pytorch/kineto).

``ts`` and ``dur`` are microseconds. A GPU event and its launch share ``correlation``; both have the
``External id`` of the innermost open operator, if any.
"""

import gzip
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec

from fp8doctor.facts.record import UnreadableDocument, decoder

LARGEST_TRACE = 4 * 2**30
"""Most bytes of JSON, which take twice the memory; an uncompiled FP8 step of 468M parameters has 0.17 GB."""

_GZIP = b"\x1f\x8b"
_PIECE = 2**24
"""Bytes to read at once."""

_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})
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


class _Gpu(msgspec.Struct):
    id: int = -1
    name: str = ""


class _Job(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class _Document(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")
    gpus: list[_Gpu] = msgspec.field(name="deviceProperties", default_factory=list)
    job: _Job = msgspec.field(name="distributedInfo", default_factory=_Job)


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
    gpus: dict[int, str] = field(default_factory=dict)
    """Number -> name of the machine's GPUs, if recorded."""
    rank: int | None = None
    world_size: int | None = None
    with_stack: bool = False


def read_trace(path: Path) -> Trace:
    """Read a trace, plain or gzip. Raises `fp8doctor.facts.record.UnreadableDocument`."""
    try:
        document = decoder(_Document).decode(_content(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableDocument(f"the trace cannot be read: {error}") from None
    except msgspec.ValidationError as error:
        raise UnreadableDocument(f"it is not a trace of torch.profiler: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableDocument(f"the trace is not JSON ({error})") from None
    by_category: dict[str, list[Event]] = defaultdict(list)
    host: dict[Thread, list[Event]] = defaultdict(list)
    for event in document.events:
        by_category[event.cat].append(event)
        if event.cat in _HOST:
            host[event.tid].append(event)
    return Trace(
        gpu=list(chain.from_iterable(by_category[category] for category in _GPU)),
        host=host,
        launches={
            event.args.correlation: event
            for category in LAUNCHES
            for event in by_category[category]
            if event.args.correlation
        },
        links=by_category["fwdbwd"],
        annotations=by_category["user_annotation"],
        gpus={each.id: each.name for each in document.gpus if each.name},
        rank=document.job.rank,
        world_size=document.job.world_size,
        with_stack="python_function" in by_category,
    )


def _content(path: Path) -> bytearray:
    """Read a file, unpacked. Raises OSError, EOFError, zlib.error or `UnreadableDocument`."""
    with path.open("rb") as file:
        opened = gzip.open if file.read(2) == _GZIP else open
    content = bytearray()
    with opened(path, "rb") as file:
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > LARGEST_TRACE:
                raise UnreadableDocument(
                    f"the trace has more than {LARGEST_TRACE >> 30} GiB; record fewer steps "
                    "(schedule=torch.profiler.schedule(wait=2, warmup=2, active=3)) without with_stack"
                )
    return content


def outer_first(event: Event) -> tuple[float, float]:
    """Order by start, and enclosing events first."""
    return event.ts, -event.dur
