"""Reads a trace as ``torch.profiler`` exports it: the file -> the events that a step is told from.

The format, from ``libkineto/src/output_json.cpp`` of pytorch/kineto and from traces of torch 2.13 on a CPU:
one JSON object whose ``traceEvents`` hold, by ``cat``, ``cpu_op`` and ``user_annotation`` (host),
``cuda_runtime`` and ``cuda_driver`` (calls that launch), ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` (GPU).
``ts`` and ``dur`` are microseconds with three decimals. A GPU event and the call that launched it share
``correlation``; both carry the ``External id`` of the innermost operator that was open, and none where none
was. ``gpu_user_annotation`` and ``cuda_sync`` lie on the GPU's rows and are no work.
"""

from __future__ import annotations

import gc
import mmap
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
"""Begins the name of an annotation around one call of a module: ``fp8doctor module <kind> <name>``, name
empty for the root."""

LARGEST_TRACE = 4 * 2**30
"""Bytes of JSON that are read, which take about twice as much memory; an eager FP8 step of 468M parameters
has 0.17 GB."""

_GZIP = b"\x1f\x8b"
_OF_GZIP = zlib.MAX_WBITS | 16
_PIECE = 2**18
"""Bytes of a compressed trace that are read at once."""

_UNPACKED_PIECE = 2**24
"""Bytes that are unpacked at once."""

MOST_PACKED = 100
"""Bytes that one byte of a compressed trace may stand for, beyond the first `ALWAYS_UNPACKED`. Traces shrink
to a tenth or a thirtieth of their size, a file that repeats one byte to a thousandth."""

ALWAYS_UNPACKED = 2**25
"""Bytes that are unpacked however well they were packed."""

_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})
_COMPILING = "(dynamo_timed)"
"""Ends the names of what torch.compile does, since torch 2.4."""

LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    external: int = msgspec.field(name="External id", default=0)
    correlation: int = 0
    device: int = -1
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    types: tuple[str, ...] = msgspec.field(name="Input type", default=())


_Time = Annotated[float, msgspec.Meta(ge=-1e20, le=1e20)]
"""Microseconds that are still a number in nanoseconds."""


class Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    ts: _Time = 0.0
    dur: _Time = 0.0
    tid: int | str = 0
    id: int | str = 0
    bp: str = ""
    """Only the end of a link has it."""
    args: _Arguments = _Arguments()


class _Document(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")
    devices: Any = msgspec.field(name="deviceProperties", default=None)
    distributed: Any = msgspec.field(name="distributedInfo", default=None)


Thread = int | str
"""As the system numbers them, over all processes."""


class TooLarge(UnreadableDocument):
    """A trace is too large, or grows too much when it is unpacked."""


@dataclass(frozen=True)
class Trace:
    """The events of an exported trace that a step is told from."""

    gpu: list[Event]
    host: dict[Thread, list[Event]]
    launches: dict[int, Event]
    """Correlation -> the call."""
    links: list[Event]
    """From an operator of the forward to its node in the backward, one event at each end."""
    annotations: list[Event] = field(default_factory=list)
    """Those of the host, which stand in ``host`` too."""
    compiling: list[Event] = field(default_factory=list)
    """What torch.compile did, which stands in ``host`` too."""
    gpus: dict[int, str] = field(default_factory=dict)
    """Number -> name of the GPUs of the machine, where the trace tells."""
    rank: int | None = None
    world_size: int | None = None
    categories: dict[str, int] = field(default_factory=dict)
    """Category -> how many events of it the file holds, those too that are not kept."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector: it would look again and again through events that are all alive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@collector_paused()
def read_trace(path: Path) -> Trace:
    """Read a trace, plain or compressed by gzip. Raises `fp8doctor.facts.record.UnreadableDocument`."""
    try:
        size = Path(path).stat().st_size
        if not size:
            raise UnreadableDocument("the trace is empty")
        if size > LARGEST_TRACE:
            raise TooLarge(too_large("the trace"))
        with (
            open(path, "rb") as file,
            mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0),
                prot=mmap.PROT_READ,
            ) as content,
        ):
            document = decoder(_Document).decode(
                b"".join(unpacked(content)) if content[:2] == _GZIP else content
            )
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
        categories={category: len(events) for category, events in by_category.items() if events},
    )


def unpacked(content: Any) -> Iterator[bytes]:
    """Unpack what gzip packed, a piece at a time. Raises EOFError where its end is missing, zlib.error where
    it is damaged, and `TooLarge` beyond `LARGEST_TRACE` or far beyond the packed size."""
    size, packed = 0, zlib.decompressobj(_OF_GZIP)
    for start in range(0, len(content), _PIECE):
        rest, full = content[start : start + _PIECE], False
        while rest or full:
            piece = packed.decompress(rest, _UNPACKED_PIECE)
            size += len(piece)
            if size > LARGEST_TRACE:
                raise TooLarge(too_large("unpacked, the trace"))
            if size > ALWAYS_UNPACKED + MOST_PACKED * (start + _PIECE):
                raise TooLarge(
                    f"its compressed content grows to more than {MOST_PACKED} times its size, as no trace "
                    "does. If you trust it, unpack it with gunzip and name the .json"
                )
            yield piece
            rest, full = packed.unconsumed_tail, len(piece) == _UNPACKED_PIECE
            if packed.eof:
                rest, full = packed.unused_data.lstrip(b"\0"), False
                if rest:
                    packed = zlib.decompressobj(_OF_GZIP)
    if not packed.eof:
        raise EOFError("the end of the compressed file is missing")


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
    """Sort by ``order``, which begins with the start."""
    starts = [event.ts for event in events]
    return events if all(map(lt, starts, islice(starts, 1, None))) else sorted(events, key=order)


def outer_first(event: Event) -> tuple[float, float]:
    """By start; of those that start together the one that encloses the other first."""
    return event.ts, -event.dur
