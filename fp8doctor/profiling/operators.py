"""Links what ran to what asked for it: an activity to the operator that launched it, a node of the backward
to the operator of the forward that made it, and both to the module around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from fp8doctor.facts import Family
from fp8doctor.profiling.kernel_families import work_inside
from fp8doctor.profiling.trace import LAUNCHES, MODULE, Event, Thread, Trace, in_order, outer_first

Place = int | tuple[int, int] | None
"""What a kernel belongs to: a module by its number, a node of the backward by its forward thread and sequence
number, or nothing."""


class Operator(msgspec.Struct, gc=False, frozen=True):
    """An operator that launched work, and what was open around it."""

    name: str | None = None
    types: tuple[str, ...] = ()
    inside: Family | None = None
    place: Place = None


NOWHERE = Operator()


@dataclass
class Modules:
    """Annotated modules, and the way from a node of the backward to the one that owns it."""

    names: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name."""
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    forward: dict[Thread, dict[int, tuple[Place, Family | None]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """Thread -> sequence number -> where its operator stood, and inside what work. Of several the last is
    right: a number is used up when a node is made."""
    threads: dict[int, Thread] = field(default_factory=dict)
    """``Fwd thread id`` -> the thread, which operators of the forward do not tell."""

    def number(self, annotation: str) -> int:
        kind, _, name = annotation.removeprefix(MODULE).partition(" ")
        number = self.numbers.setdefault((kind, name), len(self.names))
        if number == len(self.names):
            self.names.append((kind, name))
        return number

    def owner(self, place: Place) -> int | None:
        found = self._of_the_forward(place)[0] if isinstance(place, tuple) else place
        return found if isinstance(found, int) else None

    def work(self, operator: Operator) -> Family | None:
        """Tell what an operator serves: in the backward what its forward served."""
        return (
            self._of_the_forward(operator.place)[1]
            if operator.inside is None and isinstance(operator.place, tuple)
            else operator.inside
        )

    def _of_the_forward(self, node: tuple[int, int]) -> tuple[Place, Family | None]:
        thread, sequence = node
        if thread in self.threads:
            return self.forward[self.threads[thread]].get(sequence, (None, None))
        candidates = [numbers[sequence] for numbers in self.forward.values() if sequence in numbers]
        return candidates[0] if len(candidates) == 1 else (None, None)


def launching_operators(
    trace: Trace, activities: Sequence[Event], launches: Sequence[Event | None], modules: Modules
) -> list[Operator]:
    """Find the innermost operator of each activity, by ``External id``, else by the time of its launch."""
    identities: list[int] = []
    untold: dict[Thread, list[Event]] = defaultdict(list)
    for event, launch in zip(activities, launches, strict=True):
        identity = event.args.external
        if not identity and launch is not None:
            identity = -launch.args.correlation
            untold[launch.tid].append(launch)
        identities.append(identity)
    found = operators_of(trace, modules, set(identities), untold)
    return [found.get(identity, NOWHERE) for identity in identities]


def operators_of(
    trace: Trace, modules: Modules, wanted: set[int], untold: dict[Thread, list[Event]]
) -> dict[int, Operator]:
    """Go through each thread once, with what is open at each time: operators of the wanted ``External id``,
    and those open at an untold launch."""
    found: dict[int, Operator] = {}
    links, effects = _link(trace), _Effects()
    for thread in {*trace.host, *untold}:
        forward, to_place = modules.forward[thread], untold.get(thread, [])
        ahead = iter(sorted(launch.ts for launch in to_place))
        next_untold = next(ahead, inf)
        opened: list[tuple[float, Family | None, Place, Event | None]] = []
        until = inf
        inside: Family | None = None
        place: Place = None
        operator: Event | None = None
        for event in in_order(trace.host.get(thread, []) + to_place, outer_first):
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
                    found[arguments.external] = Operator(event.name, arguments.types, inside, there)
                then = effects[event.name] or inside
                if start + event.dur > next_untold:
                    by = event
            elif event.cat in LAUNCHES:
                next_untold = next(ahead, inf)
                if operator is not None:
                    found[-arguments.correlation] = Operator(
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


def _link(trace: Trace) -> dict[tuple[Thread, float], Thread]:
    """Map thread and start of a node of the backward to the thread of its operator in the forward."""
    begins = {event.id: event.tid for event in trace.links if not event.bp}
    return {
        (event.tid, event.ts): begins[event.id] for event in trace.links if event.bp and event.id in begins
    }
