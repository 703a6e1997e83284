"""Walk the module tree: clean names, and what covers each module."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.examine.marks import (
    checkpointing_of,
    compile_mark,
    forward_of_torch,
    is_called,
    is_disabled,
    is_layer,
    step_mark,
)
from fp8doctor.facts import NOT_RECORDED, Checkpointing, CompileMark
from fp8doctor.stacks.looking import (
    Ancestor,
    children_of,
    is_a,
    lineage,
    parameters_of,
    read,
    read_class,
    state_of,
    tensor,
)
from fp8doctor.stacks.torch_private import wrapped_child


@dataclass(kw_only=True)
class Place:
    """A module where it was first met; from ``compiled`` on, what those below inherit."""

    name: str
    module: nn.Module
    parent: Place | None
    children: list[Place] = field(default_factory=list)
    wrappers: tuple[nn.Module, ...] = ()
    """Its direct wrappers, outermost first, which have no place of their own."""
    adapts: dict[str, str] = field(default_factory=dict)
    """Its `adapter_parts`."""
    trainable_so_far: bool = False
    """This or an earlier module in the tree's order has a trainable parameter."""
    compiled: str | None = None
    """Name of the compiled region."""
    watched: bool = False
    """A mark above compiles no frame itself: the next forward below that Dynamo takes is a region."""
    checkpointed: Any = None
    """Name of the region, or None; ``NOT_RECORDED`` if a forward above may call ``checkpoint``."""
    flag_above: bool = False
    """A model above has transformers' flag, and its blocks have none."""
    adapter: Any = None
    adapted: str | None = None
    """Name of the layer that this is a part of, with adapters."""
    experts: int | None = None
    """Number of experts in this module's list of experts."""
    idle: bool = False
    """PEFT's unused original of a trained copy (``modules_to_save``)."""

    def upwards(self) -> Iterator[Place]:
        """Yield this place and those above it."""
        at: Place | None = self
        while at is not None:
            yield at
            at = at.parent

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (*self.wrappers, self.module)

    @property
    def lineage(self) -> tuple[Ancestor, ...]:
        return lineage(type(self.module))

    # Cached, because each of up to thousands of children asks. The tree must be complete by then.

    @cached_property
    def outputs(self) -> frozenset[int | None]:
        weights = [tensor(each.module, "weight") for each in self.children]
        return frozenset(each.shape[0] if each.ndim == 2 else None for each in weights if each is not None)

    @cached_property
    def routers(self) -> tuple[Place, ...]:
        return tuple(each for each in self.children if each.name.endswith(("router", "gate")))

    @cached_property
    def experts_below(self) -> frozenset[int]:
        """Numbers of experts in lists, and in 3-D weights, below: at most a list in a module of lists."""
        below, found = self.children, set[int]()
        for place in below:
            if "expert" in place.name.rpartition(".")[2].lower():
                weights = parameters_of(place.module).values()
                found.update(each.shape[0] for each in weights if each.ndim == 3)
        for _ in range(2):
            below = [each for child in below for each in child.children]
            found.update(each.experts for each in below if each.experts is not None)
        return frozenset(found)


class Tree:
    """The places in the tree's order, and all marks."""

    def __init__(self, unused_marks: bool = False) -> None:
        self.places: list[Place] = []
        self.marks: list[CompileMark] = []
        self.checkpointing: list[Checkpointing] = []
        self._unused_marks, self._seen, self._trainable = unused_marks, set[int](), False

    @property
    def root(self) -> Place:
        return self.places[0]

    @cached_property
    def parameters(self) -> dict[int, tuple[str, nn.Parameter]]:
        """Each parameter with its first name, by ``id``."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for place in self.places:
            for module in place.modules:
                for name, parameter in parameters_of(module).items():
                    yield (f"{place.name}.{name}" if place.name else name), parameter

    def visit(self, place: Place) -> None:
        """Visit a module, which may be in wrappers, and those below, each once."""
        inner: nn.Module | None = place.module
        while inner is not None:
            place.module = inner
            if id(inner) in self._seen:
                return
            self._seen.add(id(inner))
            self._mark_compiled(place)
            self._mark_checkpointed(place)
            self._trainable = self._trainable or trains(place.module)
            if (inner := wrapped_child(place.module)) is not None:
                place.wrappers += (place.module,)
        place.adapts, place.trainable_so_far = adapter_parts(place.module), self._trainable
        self.places.append(place)
        if place.parent:
            place.parent.children.append(place)
        experts = experts_of(place)
        for name, child in children_of(place.module).items():
            below = child_of(place, name, child)
            below.experts = experts.get(name, place.experts)
            self.visit(below)

    def _mark_checkpointed(self, place: Place) -> None:
        if (found := checkpointing_of(place.module, place.name)) is None:
            return
        self.checkpointing.append(found)
        if found.form == "wrapper" or (found.form == "huggingface" and is_layer(place.module)):
            place.checkpointed, place.flag_above = place.name, False
        elif found.form == "huggingface":
            place.flag_above = True
        elif place.checkpointed is None:
            place.checkpointed = NOT_RECORDED

    def _mark_compiled(self, place: Place) -> None:
        """Set the module's compiled region, and if one may begin below."""
        module, called = place.module, is_called(place.module)
        mark = compile_mark(module, place.name)
        if mark and self._unused_marks:
            self.marks.append(msgspec.structs.replace(mark, compiles=False, unused=True))
            place.compiled, place.watched = None, False
        elif mark:
            compiles = mark.compiles
            if compiles is False and called and place.compiled is not None:
                compiles = True  # inside a region it is traced too
            elif compiles is False and called and wrapped_child(module) is not None:
                compiles = None  # a wrapper's own frame says nothing about its module
            self.marks.append(msgspec.structs.replace(mark, compiles=compiles))
            if compiles is not False:
                place.compiled, place.watched = place.name, False
            else:
                place.watched |= called
        elif (place.compiled is not None or place.watched) and is_disabled(module):
            place.compiled, place.watched = None, False
        elif place.watched and called and not forward_of_torch(module):
            place.compiled, place.watched = place.name, False


def walk(
    model: nn.Module,
    training_step: Callable[..., Any] | None = None,
    *,
    unused_marks: bool = False,
    in_a_function: bool = False,
) -> Tree:
    """Visit every module once, in the order of ``named_modules``.

    ``unused_marks`` and ``in_a_function`` are those of `Job`. Raises `UserError` for
    a model that is nested too deep.
    """
    tree, step = Tree(unused_marks), step_mark(training_step, seen=in_a_function)
    if step:
        tree.marks.append(step)
    try:
        tree.visit(Place(name="", module=model, parent=None, compiled="" if step else None))
    except RecursionError:
        raise UserError(
            "the model nests its modules deeper than Python's recursion limit allows, which is "
            f"{sys.getrecursionlimit()}. To read it, type sys.setrecursionlimit(20_000) before you build it"
        ) from None
    _cover_where_called(tree.places)
    deciding = {above.name for each in tree.places if is_layer(each.module) for above in each.upwards()}
    layers = {each.name for each in tree.places if is_layer(each.module)}
    tree.checkpointing = [  # from transformers 4.53 on a model's flag decides nothing if its layers do
        each
        for each in tree.checkpointing
        if each.form != "huggingface" or each.name in layers or each.name not in deciding
    ]
    return tree


def _cover_where_called(places: list[Place]) -> None:
    """Give modules that took a layer's forward (kohya's LoRA) its cover, and what follows it gradients."""
    takers = {id(read(state_of(each.module).get("forward"), "__self__")): each for each in places}
    below = [(each, takers[id(each.module)]) for each in places if id(each.module) in takers]
    trained, so_far = set[str](), False
    while below:
        place, layer = below.pop()
        if place is not layer:
            place.compiled, place.watched = layer.compiled, layer.watched
            place.checkpointed, place.adapted = layer.checkpointed, layer.name
            below += [(child, layer) for child in place.children]
            if trains(place.module):
                trained.add(layer.name)
    for place in places:
        place.trainable_so_far |= so_far
        so_far |= place.name in trained


def adapter_parts(module: nn.Module) -> dict[str, str]:
    """Tell which children of a module are adapters, and which is the base; the module's own name is empty.

    By name: those of PEFT's tuners (``oft_R``, ...), and ``lora_`` of PEFT, torchtune, kohya and diffusers.
    By structure: beside a frozen Linear, trainable ones from and to its sides, with fewer weights.
    """
    children = children_of(module)
    named = read_class(type(module), "adapter_layer_names") if "base_layer" in children else ()
    tuned = named if is_a(named, tuple) else ()
    found = {name: "adapter" for name in children if name.startswith("lora_") or name in tuned}
    sized = {name: sides for name, child in children.items() if (sides := sides_of(child))}
    low = {name: sides for name, sides in sized.items() if trains(children[name])}
    frozen = {name: sides for name, sides in sized.items() if name not in low}
    for base, (into, out) in frozen.items():
        ranks = {r for start, r in low.values() if start == into} & {
            r for r, end in low.values() if end == out
        }
        pairs = {each for r in ranks if r * (into + out) < into * out for each in ((into, r), (r, out))}
        found |= {name: "adapter" for name, sides in low.items() if sides in pairs}
        if pairs or (found and base not in found):
            found[base] = "base"
    if found and "base" not in found.values():
        found["base_layer" if "base_layer" in children else ""] = "base"
    return found


def sides_of(module: nn.Module) -> tuple[int, int] | None:
    """Read the features of a Linear, or of what has them as a Linear has."""
    state = state_of(module)
    into, out = state.get("in_features"), state.get("out_features")
    return (into, out) if type(into) is int and type(out) is int else None


def trains(module: nn.Module) -> bool:
    return any(each.requires_grad for each in parameters_of(module).values())


def child_of(place: Place, child_name: str, child: nn.Module) -> Place:
    """Return the place of a child: it inherits, but flagged blocks and LoRA's parts differ."""
    name = f"{place.name}.{child_name}" if place.name else child_name
    below = replace(place, name=name, module=child, parent=place, children=[], wrappers=())
    if below.flag_above and is_a(place.module, nn.ModuleList):
        below.flag_above = False
        if not is_layer(child):
            below.checkpointed = name
    if below.adapter != "adapter" and child_name in place.adapts:
        # Around expert weights PEFT nests its wrappers: the base of one holds the adapter of the next.
        below.adapter, below.adapted = place.adapts[child_name], place.name
    below.idle |= child_name == "original_module" and "modules_to_save" in children_of(place.module)
    return below


def experts_of(place: Place) -> dict[str, int]:
    """Return a module's children that are routed experts by name, with their class's count.

    Shared experts serve every token and do not count.
    """
    siblings = children_of(place.module)
    own = place.name.rpartition(".")[2].lower()
    if "shared" in own:
        return {}
    if is_a(place.module, (nn.ModuleList, nn.ModuleDict)):
        found = siblings if "expert" in own else {}
    else:
        numbered = re.compile(r"^experts?_?\d+$", re.IGNORECASE)
        found = {name: child for name, child in siblings.items() if numbered.search(name)}
    alike = Counter(map(type, found.values()))  # NllbMoe keeps a dropout among its experts
    return {name: alike[type(child)] for name, child in found.items()} if len(found) > 1 else {}


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(state_of(module).get(each, ())) for each in kinds)
