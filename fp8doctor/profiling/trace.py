"""Where one profiled step goes: a trace as ``torch.profiler`` exports it -> GPU time per family of kernels
and per module, idle time and its cause.

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
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, islice, pairwise
from math import inf
from operator import attrgetter, lt
from pathlib import Path
from typing import Any

import msgspec

from fp8doctor.facts import Family, KernelGroup, ModuleTime
from fp8doctor.facts.record import UnreadableDocument, decoder
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, classify, is_fp8_gemm, work_inside

MODULE = "fp8doctor module "
"""Begins the name of an annotation around one call of a module: ``fp8doctor module <kind> <name>``, name
empty for the root."""

_GZIP = b"\x1f\x8b"
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST = frozenset({"cpu_op", "user_annotation"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})

_NO_WORK = re.compile(
    r"^aten::_?(empty\w*|new_empty\w*|as_strided|view\w*|unsafe_view|reshape\w*|t|transpose|permute|expand\w*|select|slice|narrow|squeeze|unsqueeze|split\w*"
    r"|chunk|unbind|unfold|flatten|alias|detach|lift_fresh|set|resize\w*|result_type|resolve_conj|resolve_neg|item|is_nonzero|to|to_copy|type_as|contiguous"
    r"|clone|linear|matmul|einsum|movedim|unflatten|real|conj|numpy_T|broadcast_\w+|meshgrid)_?$"
)
"""Operators that allocate, view, or only call others: on a CPU their time belongs to the operator around
them."""

_NO_OPERATOR = re.compile(
    r"^(autograd::|torch::autograd::|PythonSubclass$|Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|[^:]*$)"
)
"""What is on the host's row without computing: nodes of autograd, autograd functions in Python, parts of
Dynamo's runtime."""

_COMPILED_GRAPH = re.compile(r"^CompiledFunction(Backward)?$")
"""A compiled graph on a CPU: Inductor's C++ loops have no events of their own, so what they do is unknown."""

_FIRST_OF_A_CAST = re.compile(r"AbsFunctor")
_LAST_OF_A_CAST = re.compile(r"float8_copy")
_CAST_KERNELS = 12
"""An eager cast of torchao 0.18 has at most so many kernels: abs, max, two copies, clamp, reciprocal, mul;
copy, mul, clamp, copy to FP8."""


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    external: int = msgspec.field(name="External id", default=0)
    correlation: int = 0
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    types: tuple[str, ...] = msgspec.field(name="Input type", default=())


class _Event(msgspec.Struct, gc=False):
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
    events: list[_Event] = msgspec.field(name="traceEvents")


_Thread = int | str
"""As the system numbers them, over all processes."""

_start_end_name = attrgetter("ts", "dur", "name")


@dataclass(frozen=True)
class Trace:
    """The events of an exported trace that `step_of` reads."""

    gpu: list[_Event]
    host: dict[_Thread, list[_Event]]
    launches: dict[int, _Event]
    """Correlation -> the call."""
    links: list[_Event]
    """From an operator of the forward to its node in the backward, one event at each end."""


@dataclass(frozen=True)
class ProfiledStep:
    """One step, as the profiler saw it. The profiler slows the host down, so gaps between kernels are its
    own, not the step's."""

    families_ms: dict[Family, float]
    """Every instant at which the GPU worked has one owner, so they add up to ``busy_ms``."""
    busy_ms: float
    """Union of kernels, copies and fills over all streams; of operators on a CPU."""
    window_ms: float
    """From the first activity's begin to the last one's end."""
    host_wait_pct: float | None
    """Share of the gaps that ended with a kernel whose launch began after the GPU had run dry; None without
    gaps, and on a CPU."""
    kernels: int
    """Activities of the GPU; operators that compute on a CPU."""
    unclassified_ms: float
    """Of ``busy_ms``: kernels that no rule knows."""
    groups: tuple[KernelGroup, ...]
    """All of them, the longest first; a name that does two kinds of work has two. They add up to
    ``busy_ms``."""
    modules: tuple[ModuleTime, ...]
    """Modules with an annotation and work of their own, the longest first."""
    on_gpu: bool = True
    """False where the trace holds nothing of a GPU, so that a CPU's operators were split."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's garbage collector, which would look through hundreds of thousands of events that are
    all alive again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_paused()
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
    by_category: dict[str, list[_Event]] = defaultdict(list)
    for event in document.events:
        by_category[event.cat].append(event)
    return Trace(
        gpu=list(chain.from_iterable(by_category[category] for category in _GPU)),
        host=_by_thread(chain.from_iterable(by_category[category] for category in _HOST)),
        launches={
            event.args.correlation: event
            for category in _LAUNCH
            for event in by_category[category]
            if event.args.correlation
        },
        links=by_category["fwdbwd"],
    )


def _by_thread(events: Iterable[_Event]) -> dict[_Thread, list[_Event]]:
    threads: dict[_Thread, list[_Event]] = defaultdict(list)
    for event in events:
        threads[event.tid].append(event)
    return threads


_Place = int | tuple[int, int] | None
"""What a kernel belongs to: a module by its number, a node of the backward by its forward thread and sequence
number, or nothing."""


class _Operator(msgspec.Struct, gc=False, frozen=True):
    """An operator that launched work, and what was open around it."""

    name: str | None = None
    types: tuple[str, ...] = ()
    inside: Family | None = None
    place: _Place = None


_NOWHERE = _Operator()


@dataclass
class _Modules:
    """Annotated modules, and the way from a node of the backward to the one that owns it."""

    names: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name."""
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    forward: dict[_Thread, dict[int, tuple[_Place, Family | None]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Thread -> sequence number -> where its operator stood, and inside what work. Of several the last is
    right: a number is used up when a node is made."""
    threads: dict[int, _Thread] = field(default_factory=dict)
    """``Fwd thread id`` -> the thread, which operators of the forward do not tell."""

    def number(self, annotation: str) -> int:
        kind, _, name = annotation.removeprefix(MODULE).partition(" ")
        number = self.numbers.setdefault((kind, name), len(self.names))
        if number == len(self.names):
            self.names.append((kind, name))
        return number

    def owner(self, place: _Place) -> int | None:
        found = self._of_the_forward(place)[0] if isinstance(place, tuple) else place
        return found if isinstance(found, int) else None

    def work(self, operator: _Operator) -> Family | None:
        """What an operator serves: in the backward what its forward served."""
        return (
            self._of_the_forward(operator.place)[1]
            if operator.inside is None and isinstance(operator.place, tuple)
            else operator.inside
        )

    def _of_the_forward(self, node: tuple[int, int]) -> tuple[_Place, Family | None]:
        thread, sequence = node
        if thread in self.threads:
            return self.forward[self.threads[thread]].get(sequence, (None, None))
        candidates = [numbers[sequence] for numbers in self.forward.values() if sequence in numbers]
        return candidates[0] if len(candidates) == 1 else (None, None)


_Span = tuple[int, int, int, int]
"""Start and end in ns, rank (what of several at one time owns it: the lowest), index of the work."""

_RANKS: dict[Family, int] = {"communication": 1, "copy": 2}
"""0 for all that computes."""


@dataclass
class _Kind:
    """Works of one name, family and operator: activities of the GPU, or operators on a CPU."""

    name: str
    family: Family
    operator: str | None
    count: int = 0
    time: int = 0


@dataclass
class _Works:
    """What is to be timed: kind and place of each, and when it ran."""

    kinds: list[_Kind] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)
    """Begin of the call that launched each, -1 where none is known."""


@_collector_paused()
def step_of(trace: Trace) -> ProfiledStep:
    """Split the step that the trace holds. Raises `fp8doctor.facts.record.UnreadableDocument` where it holds
    no activity, or lost the GPU's."""
    if trace.launches and not trace.gpu:
        raise UnreadableDocument(
            "the trace holds calls of the CUDA runtime and no kernels: the profiler did not see the GPU"
        )
    modules = _Modules()
    works = _of_gpu(trace, modules) if trace.gpu else _of_cpu(trace, modules)
    if not works.spans:
        raise UnreadableDocument("the trace holds neither kernels nor operators")
    owned, idle, waited = _sweep(works)
    by_place: dict[_Place, dict[Family, int]] = {}
    for kind, place, time in zip(works.kinds, works.places, owned, strict=True):
        kind.count += 1
        kind.time += time
        if place is not None:
            times = by_place.setdefault(place, {})
            times[kind.family] = times.get(kind.family, 0) + time
    groups = _groups(works.kinds)
    families: dict[Family, int] = defaultdict(int)
    for group in groups:
        families[group.family] += group.time
    return ProfiledStep(
        families_ms={
            family: _ms(time)
            for family, time in sorted(families.items(), key=lambda item: (-item[1], item[0]))
        },
        busy_ms=_ms(sum(owned)),
        window_ms=_ms(sum(owned) + idle),
        host_wait_pct=100 * waited / idle if idle and trace.gpu else None,
        kernels=len(works.kinds),
        unclassified_ms=_ms(families.get("unknown", 0)),
        groups=tuple(
            KernelGroup(
                name=each.name,
                family=each.family,
                operator=each.operator,
                count=each.count,
                time_ms=_ms(each.time),
            )
            for each in groups
        ),
        modules=_by_module(by_place, modules),
        on_gpu=bool(trace.gpu),
    )


def _groups(kinds: Iterable[_Kind]) -> list[_Kind]:
    """Kinds of one name and family as one, the longest first; without operator where several launched
    them."""
    groups: dict[tuple[str, Family], _Kind] = {}
    for kind in {id(each): each for each in kinds}.values():
        group = groups.setdefault((kind.name, kind.family), _Kind(kind.name, kind.family, kind.operator))
        group.count += kind.count
        group.time += kind.time
        if group.operator != kind.operator:
            group.operator = None
    return sorted(groups.values(), key=lambda group: (-group.time, group.name, group.family))


def _by_module(by_place: dict[_Place, dict[Family, int]], modules: _Modules) -> tuple[ModuleTime, ...]:
    times: dict[int, dict[Family, int]] = defaultdict(lambda: defaultdict(int))
    for place, families in by_place.items():
        owner = modules.owner(place)
        if owner is not None:
            for family, time in families.items():
                times[owner][family] += time
    ordered = sorted(times.items(), key=lambda item: (-sum(item[1].values()), modules.names[item[0]]))
    return tuple(
        ModuleTime(
            kind=modules.names[owner][0],
            name=modules.names[owner][1],
            families_ms={family: _ms(time) for family, time in families.items() if time},
        )
        for owner, families in ordered
        if any(families.values())
    )


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6


def _sweep(works: _Works) -> tuple[list[int], int, int]:
    """Time that each work owns, the gaps, and the gaps that ended with a work launched within them.

    Of several works at one time the lowest rank owns it, then the one that began first.
    """
    spans = sorted(works.spans)
    following = [*[start for start, _, _, _ in spans[1:]], inf]
    owned, idle, waited, busy_until = [0] * len(works.kinds), 0, 0, spans[0][0]
    together: list[_Span] = []
    for span, next_start in zip(spans, following, strict=True):
        start, end, _, work = span
        if start >= busy_until:
            idle += start - busy_until
            if works.launched[work] > busy_until:
                waited += start - busy_until
            if end <= next_start:
                owned[work] += end - start
                busy_until = end
                continue
        together.append(span)
        busy_until = max(busy_until, end)
        if busy_until <= next_start:
            _share(together, owned)
            together = []
    return owned, idle, waited


def _share(spans: Sequence[_Span], owned: list[int]) -> None:
    """Divide a stretch without gaps among spans that overlap, which are in order of their start."""
    times = sorted({time for start, end, _, _ in spans for time in (start, end)})
    running: list[tuple[int, int, int, int]] = []
    coming = 0
    for now, then in pairwise(times):
        while coming < len(spans) and spans[coming][0] <= now:
            start, end, rank, work = spans[coming]
            heappush(running, (rank, start, end, work))
            coming += 1
        while running[0][2] <= now:
            heappop(running)
        owned[running[0][3]] += then - now


def _of_gpu(trace: Trace, modules: _Modules) -> _Works:
    """Kernels, copies and fills."""
    activities = _in_order(trace.gpu, _start_end_name)
    launches = [trace.launches.get(event.args.correlation) for event in activities]
    operators = _launching_operators(trace, activities, launches, modules)
    numbers: dict[tuple[str, str | None, tuple[str, ...], Family | None], int] = {}
    numbered = [
        numbers.setdefault((event.name, operator.name, operator.types, modules.work(operator)), len(numbers))
        for event, operator in zip(activities, operators, strict=True)
    ]
    fp8_step = any(
        FP8_GEMM_KERNEL.search(name) or (operator is not None and is_fp8_gemm(operator))
        for name, operator, _, _ in numbers
    )
    kinds = [
        _Kind(name, classify(name, operator, types, inside, fp8_step), operator)
        for name, operator, types, inside in numbers
    ]
    starts = [round(event.ts * 1e3) for event in activities]
    ends = [start + round(event.dur * 1e3) for start, event in zip(starts, activities, strict=True)]
    works = _Works([kinds[number] for number in numbered], [operator.place for operator in operators])
    _name_casts_without_operators(works.kinds)
    works.spans = list(
        zip(
            starts,
            ends,
            [_RANKS.get(kind.family, 0) for kind in works.kinds],
            range(len(starts)),
            strict=True,
        )
    )
    works.launched = [-1.0 if launch is None else launch.ts * 1e3 for launch in launches]
    return works


def _name_casts_without_operators(kinds: list[_Kind]) -> None:
    """Where no operator is known (CUDA graphs, a trace of the GPU alone): the pointwise kernels from an amax
    up to a copy to FP8 are its cast."""
    casts: dict[int, _Kind] = {}
    for last, kind in enumerate(kinds):
        if kind.operator is None and _LAST_OF_A_CAST.search(kind.name):
            for first in range(last - 1, max(-1, last - _CAST_KERNELS), -1):
                before = kinds[first]
                if before.operator is not None or before.family not in ("pointwise", "copy"):
                    break
                if _FIRST_OF_A_CAST.search(before.name):
                    kinds[first:last] = [
                        casts.setdefault(id(each), _Kind(each.name, "cast", None))
                        for each in kinds[first:last]
                    ]
                    break


def _launching_operators(
    trace: Trace, activities: Sequence[_Event], launches: Sequence[_Event | None], modules: _Modules
) -> list[_Operator]:
    """The innermost operator of each activity, by ``External id``, else by the time of its launch."""
    identities: list[int] = []
    untold: dict[_Thread, list[_Event]] = defaultdict(list)
    for event, launch in zip(activities, launches, strict=True):
        identity = event.args.external
        if not identity and launch is not None:
            identity = -launch.args.correlation
            untold[launch.tid].append(launch)
        identities.append(identity)
    found = _walk(trace, modules, set(identities), untold)
    return [found.get(identity, _NOWHERE) for identity in identities]


def _in_order(events: list[_Event], order: Callable[[_Event], tuple[Any, ...]]) -> list[_Event]:
    """Sorted by ``order``, which begins with the start."""
    starts = [event.ts for event in events]
    return events if all(map(lt, starts, islice(starts, 1, None))) else sorted(events, key=order)


def _outer_first(event: _Event) -> tuple[float, float]:
    """By start; of those that start together the one that encloses the other first."""
    return event.ts, -event.dur


def _link(trace: Trace) -> dict[tuple[_Thread, float], _Thread]:
    """Thread and start of a node of the backward -> thread of its operator in the forward."""
    begins = {event.id: event.tid for event in trace.links if not event.bp}
    return {
        (event.tid, event.ts): begins[event.id] for event in trace.links if event.bp and event.id in begins
    }


def _walk(
    trace: Trace, modules: _Modules, wanted: set[int], untold: dict[_Thread, list[_Event]]
) -> dict[int, _Operator]:
    """Go through each thread once, with what is open at each time: operators of the wanted ``External id``,
    and those open at an untold launch."""
    found: dict[int, _Operator] = {}
    links, effects = _link(trace), _Effects()
    for thread in {*trace.host, *untold}:
        forward, to_place = modules.forward[thread], untold.get(thread, [])
        ahead = iter(sorted(launch.ts for launch in to_place))
        next_untold = next(ahead, inf)
        opened: list[tuple[float, Family | None, _Place, _Event | None]] = []
        until = inf
        inside: Family | None = None
        place: _Place = None
        operator: _Event | None = None
        for event in _in_order(trace.host.get(thread, []) + to_place, _outer_first):
            start = event.ts
            while until <= start:
                _, inside, place, operator = opened.pop()
                until = opened[-1][0] if opened else inf
            arguments = event.args
            then, there, by = inside, place, operator
            if event.cat == "cpu_op":
                sequence = arguments.sequence
                if sequence >= 0:
                    if arguments.forward_thread:
                        there = (arguments.forward_thread, sequence)
                        if arguments.forward_thread not in modules.threads and (thread, start) in links:
                            modules.threads[arguments.forward_thread] = links[thread, start]
                    else:
                        forward[sequence] = place, inside
                if arguments.external in wanted:
                    found[arguments.external] = _Operator(event.name, arguments.types, inside, there)
                then = effects[event.name] or inside
                if start + event.dur > next_untold:
                    by = event
            elif event.cat in _LAUNCH:
                next_untold = next(ahead, inf)
                if operator is not None:
                    found[-arguments.correlation] = _Operator(
                        operator.name, operator.args.types, inside, place
                    )
            elif event.name.startswith(MODULE):
                there = modules.number(event.name)
            elif event.name.startswith("Optimizer."):
                then = "optimizer"
            if then is not inside or there is not place or by is not operator:
                until = start + event.dur
                opened.append((until, inside, place, operator))
                inside, place, operator = then, there, by
    return found


class _Effects(dict[str, Family | None]):
    """Name of an operator -> what it makes of the work inside it."""

    def __missing__(self, name: str) -> Family | None:
        effect = self[name] = work_inside(name)
        return effect


def _of_cpu(trace: Trace, modules: _Modules) -> _Works:
    """Operators that compute; each instant belongs to the innermost one, and the inside of an FP8 GEMM, which
    a CPU emulates, to that GEMM."""
    events = [event for thread in trace.host.values() for event in thread if event.cat == "cpu_op"]
    operators = _walk(trace, modules, {event.args.external for event in events}, {})
    works = _Works()
    handed_on: set[int] = set()
    for thread in trace.host.values():
        opened: list[tuple[int, int | None, bool]] = []
        owner: int | None = None
        whole, since = False, 0
        for event in _in_order(thread, _outer_first):
            start = round(event.ts * 1e3)
            while opened and opened[-1][0] <= start:
                since = _own(works, since, opened[-1][0], owner)
                _, owner, whole = opened.pop()
            since = _own(works, since, start, owner)
            opened.append((start + round(event.dur * 1e3), owner, whole))
            if event.cat != "cpu_op" or whole:
                continue
            if event.name == "PythonSubclass" and owner is not None:
                handed_on.add(owner)
            if _COMPILED_GRAPH.match(event.name) or not (
                _NO_WORK.match(event.name) or _NO_OPERATOR.match(event.name)
            ):
                operator = operators[event.args.external]
                owner, whole = len(works.kinds), is_fp8_gemm(event.name)
                works.kinds.append(
                    _Kind(
                        event.name,
                        classify("", event.name, operator.types, modules.work(operator)),
                        event.name,
                    )
                )
                works.places.append(operator.place)
        while opened:
            since = _own(works, since, opened[-1][0], owner)
            _, owner, whole = opened.pop()
    kept = {
        old: new
        for new, old in enumerate(index for index in range(len(works.kinds)) if index not in handed_on)
    }
    spans = [
        (start, end, _RANKS.get(works.kinds[index].family, 0), kept[index])
        for start, end, _, index in works.spans
        if index in kept
    ]
    return _Works(
        [works.kinds[index] for index in kept],
        [works.places[index] for index in kept],
        spans,
        [-1.0] * len(kept),
    )


def _own(works: _Works, since: int, until: int, owner: int | None) -> int:
    """Note whose the time up to ``until`` was; the end of that time."""
    if owner is not None and until > since:
        works.spans.append((since, until, 0, owner))
    return max(since, until)
