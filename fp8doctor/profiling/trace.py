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
import gzip
import mmap
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from operator import lt
from pathlib import Path
from typing import Any

import msgspec

from fp8doctor.facts.record import UnreadableDocument, decoder

MODULE = "fp8doctor module "
"""Begins the name of an annotation around one call of a module: ``fp8doctor module <kind> <name>``, name
empty for the root."""

_GZIP = b"\x1f\x8b"
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    external: int = msgspec.field(name="External id", default=0)
    correlation: int = 0
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    types: tuple[str, ...] = msgspec.field(name="Input type", default=())


class Event(msgspec.Struct, gc=False):
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    id: int | str = 0
    bp: str = ""
    """Only the end of a link has it."""
    args: _Arguments = _Arguments()


class _Document(msgspec.Struct):
    events: list[Event] = msgspec.field(name="traceEvents")


Thread = int | str
"""As the system numbers them, over all processes."""


@dataclass(frozen=True)
class Trace:
    """The events of an exported trace that a step is told from."""

    gpu: list[Event]
    host: dict[Thread, list[Event]]
    launches: dict[int, Event]
    """Correlation -> the call."""
    links: list[Event]
    """From an operator of the forward to its node in the backward, one event at each end."""


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
        if not Path(path).stat().st_size:
            raise UnreadableDocument("the trace is empty")
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
                gzip.decompress(content) if content[:2] == _GZIP else content
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
    )


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
