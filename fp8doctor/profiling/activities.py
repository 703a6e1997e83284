"""What ran in a step, on the GPU or else on the CPU: its family, its place and its time."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from operator import attrgetter

from fp8doctor.facts import Family
from fp8doctor.profiling.kernel_families import FP8_GEMM_KERNEL, classify, is_fp8_gemm
from fp8doctor.profiling.operators import Modules, Place, launching_operators, operators_of
from fp8doctor.profiling.trace import Trace, in_order, outer_first

_NO_WORK = re.compile(
    r"^aten::_?(empty\w*|new_empty\w*|as_strided|view\w*|unsafe_view|reshape\w*|t|transpose|permute|expand\w*|select|slice|narrow|squeeze|unsqueeze|split\w*"
    r"|chunk|unbind|unfold|flatten|alias|detach|lift_fresh|set|resize\w*|result_type|resolve_conj|resolve_neg|item|is_nonzero|to|to_copy|type_as|contiguous"
    r"|clone|linear|matmul|einsum|movedim|unflatten|real|conj|numpy_T|broadcast_\w+|meshgrid)_?$"
)
"""Operators that allocate, view, or only call others: on a CPU the operator around owns their time."""

_NO_OPERATOR = re.compile(
    r"^(autograd::|torch::autograd::|PythonSubclass$|Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|[^:]*$)"
)
"""Rows of the host that compute nothing: autograd's nodes, its functions in Python, Dynamo's runtime."""

_COMPILED_GRAPH = re.compile(r"^CompiledFunction(Backward)?$")
"""A compiled graph on a CPU: Inductor's C++ loops have no events of their own, so what they do is unknown."""

_FIRST_OF_A_CAST = re.compile(r"AbsFunctor")
_LAST_OF_A_CAST = re.compile(r"float8_copy")
_CAST_KERNELS = 12
"""An eager cast of torchao 0.18 has at most so many kernels: abs, max, two copies, clamp, reciprocal, mul;
copy, mul, clamp, copy to FP8."""

_START_END_NAME = attrgetter("ts", "dur", "name")

Span = tuple[int, int, int, int]
"""Start and end in ns, rank (what of several at one time owns it: the lowest), index of the work."""

_RANKS: dict[Family, int] = {"communication": 1, "copy": 2}
"""0 for all that computes."""


@dataclass
class Kind:
    """Works of one name, family and operator: activities of the GPU, or operators on a CPU."""

    name: str
    family: Family
    operator: str | None
    count: int = 0
    time: int = 0


@dataclass
class Works:
    """What is to be timed: kind and place of each, and when it ran."""

    kinds: list[Kind] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)
    """Begin of the call that launched each, -1 where none is known."""


def gpu_activities(trace: Trace, modules: Modules) -> Works:
    """Collect kernels, copies and fills."""
    activities = in_order(trace.gpu, _START_END_NAME)
    launches = [trace.launches.get(event.args.correlation) for event in activities]
    operators = launching_operators(trace, activities, launches, modules)
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
        Kind(name, classify(name, operator, types, inside, fp8_step), operator)
        for name, operator, types, inside in numbers
    ]
    starts = [round(event.ts * 1e3) for event in activities]
    ends = [start + round(event.dur * 1e3) for start, event in zip(starts, activities, strict=True)]
    works = Works([kinds[number] for number in numbered], [operator.place for operator in operators])
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


def _name_casts_without_operators(kinds: list[Kind]) -> None:
    """Call the pointwise kernels from an amax up to a copy to FP8 its cast, where no operator is known (CUDA
    graphs, a trace of the GPU alone)."""
    casts: dict[int, Kind] = {}
    for last, kind in enumerate(kinds):
        if kind.operator is None and _LAST_OF_A_CAST.search(kind.name):
            for first in range(last - 1, max(-1, last - _CAST_KERNELS), -1):
                before = kinds[first]
                if before.operator is not None or before.family not in ("pointwise", "copy"):
                    break
                if _FIRST_OF_A_CAST.search(before.name):
                    kinds[first:last] = [
                        casts.setdefault(id(each), Kind(each.name, "cast", None))
                        for each in kinds[first:last]
                    ]
                    break


def cpu_activities(trace: Trace, modules: Modules) -> Works:
    """Collect operators that compute. The innermost one owns each instant; an FP8 GEMM, which a CPU emulates,
    owns its inside."""
    events = [event for thread in trace.host.values() for event in thread if event.cat == "cpu_op"]
    operators = operators_of(trace, modules, {event.args.external for event in events}, {})
    works = Works()
    handed_on: set[int] = set()
    for thread in trace.host.values():
        opened: list[tuple[int, int | None, bool]] = []
        owner: int | None = None
        whole, since = False, 0
        for event in in_order(thread, outer_first):
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
                    Kind(
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
    return Works(
        [works.kinds[index] for index in kept],
        [works.places[index] for index in kept],
        spans,
        [-1.0] * len(kept),
    )


def _own(works: Works, since: int, until: int, owner: int | None) -> int:
    """Note whose the time up to ``until`` was, and return the end of that time."""
    if owner is not None and until > since:
        works.spans.append((since, until, 0, owner))
    return max(since, until)
