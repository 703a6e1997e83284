"""One walk over the module tree: clean names, and what covers each module from above."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import msgspec
from torch import nn

from fp8doctor.errors import UserError
from fp8doctor.examine.checkpointing import checkpointing_of, is_layer
from fp8doctor.examine.compile_marks import compile_mark, forward_of_torch, is_called, is_disabled, step_mark
from fp8doctor.examine.kind import Kind
from fp8doctor.facts import Checkpointing, CompileMark
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks.looking import children_of, is_a, lineage, parameters_of, read_class, tensor, tensors_of
from fp8doctor.stacks.torch_private import (
    CHECKPOINT_WRAPPERS,
    CHECKPOINTED_CHILD,
    COMPILED_CHILD,
    FSDP1_CHILD,
    OPTIMIZED_MODULE,
)

WRAPPERS = {
    OPTIMIZED_MODULE: COMPILED_CHILD,
    (CHECKPOINT_WRAPPERS, "CheckpointWrapper"): CHECKPOINTED_CHILD,
    (CHECKPOINT_WRAPPERS, "OffloadWrapper"): CHECKPOINTED_CHILD,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): FSDP1_CHILD,
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
}
"""Class of a wrapper -> the child that it wraps, which takes the wrapper's name."""

REGIONS = ("wrapper", "composable", "whole_forward")
"""Forms of checkpointing that recompute the very module they are found on."""

NUMBERED_EXPERT = re.compile(r"^experts?_?\d+$", re.IGNORECASE)
"""Names of experts that are children of a module one by one."""

OF_EXPERTS = re.compile(r"expert|moe|mixture|switch", re.IGNORECASE)
"""Classes whose list beside a router is one of experts, whatever it is called."""

ROUTERS = ("router", "gate", "gating", "switch", "wg")
"""How the name of a router ends. ``wg``: DeepSpeed's."""

ROUTER_NAMES = ("router", "gate")
"""How the name of a router ends that decides how many experts a token visits."""

DEEPEST_LIST = 2
"""Modules from what stands beside a router down to an expert: their list, or the module of several lists."""

INNER_NAMES = frozenset(WRAPPERS.values())


@dataclass
class Place:
    """A module where it was met first, and what covers it there."""

    name: str
    module: nn.Module
    kind: Kind
    parent: Place | None
    children: list[Place] = field(default_factory=list)
    wrappers: tuple[nn.Module, ...] = ()
    """The wrappers directly around it, outermost first; they are no places of their own."""
    compiled: str | None = None
    checkpointed: Any = None
    """Name of the region, or None; ``NOT_RECORDED`` where a forward above may call ``checkpoint``."""
    adapter: Any = None
    experts: int | None = None
    """Number of experts in the list of expert modules that this module is in."""
    idle: bool = False
    """PEFT keeps this original aside and runs its trained copy instead (``modules_to_save``)."""
    trainable_so_far: bool = False
    """Whether this module or one before it, in the order of the tree, has a trainable parameter."""

    # Each of its children asks these, so they are found once: a list may hold thousands. The tree has to be
    # whole by then.

    @cached_property
    def outputs(self) -> frozenset[int | None]:
        """The outputs of the Linears right below; None stands for a weight of another kind."""
        weights = [tensor(each.module, "weight") for each in self.children]
        return frozenset(each.shape[0] if each.ndim == 2 else None for each in weights if each is not None)

    @cached_property
    def experts_below(self) -> frozenset[int]:
        """How many experts each list of them holds that stands right below, or in a list right below."""
        below, found = self.children, set[int]()
        for _ in range(DEEPEST_LIST):
            below = [each for child in below for each in child.children]
            found.update(each.experts for each in below if each.experts is not None)
        return frozenset(found)

    @cached_property
    def holds_experts(self) -> bool:
        """Whether a module right below is called an expert, or experts."""
        return any("expert" in each.lower() for each in children_of(self.module))

    @cached_property
    def routers(self) -> tuple[Place, ...]:
        """The routers right below, by their names."""
        return tuple(child for child in self.children if child.name.endswith(ROUTER_NAMES))


@dataclass
class Tree:
    """The places in the order of the tree, and all marks on the way."""

    places: list[Place] = field(default_factory=list)
    marks: list[CompileMark] = field(default_factory=list)
    checkpointing: list[Checkpointing] = field(default_factory=list)
    aliases: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Further names of modules that are in the tree more than once."""

    @property
    def root(self) -> Place:
        """The model without its wrappers."""
        return self.places[0]


@dataclass(frozen=True)
class Cover:
    """What a module inherits from above."""

    compiled: str | None = None
    watched: bool = False
    """A mark above compiles no frame of its own: the first forward below that Dynamo takes is a region."""
    checkpointed: Any = None
    flag_above: bool = False
    """A model above has transformers' flag set and its blocks carry none of their own."""
    adapter: Any = None
    experts: int | None = None
    idle: bool = False


def walk(
    model: nn.Module, training_step: Callable[..., Any] | None = None, *, unused_marks: bool = False
) -> Tree:
    """Visit every module once, in the order of ``named_modules``.

    With ``unused_marks`` training steps ran, and what the compile marks cover did not compile in them. Raises
    `UserError` for a model that is nested too deep.
    """
    tree, step = Tree(), step_mark(training_step)
    if step:
        tree.marks.append(step)
    try:
        _Walk(tree, unused_marks).visit(model, "", None, Cover(compiled="" if step else None))
    except RecursionError:
        raise UserError(
            "the model nests its modules deeper than Python's recursion limit allows, which is "
            f"{sys.getrecursionlimit()}. To read it, type sys.setrecursionlimit(20_000) before you build it"
        ) from None
    layers = tuple(place.name for place in tree.places if is_layer(place.kind))
    tree.checkpointing = [each for each in tree.checkpointing if not _decides_nothing(each, layers)]
    return tree


def _decides_nothing(found: Checkpointing, layers: tuple[str, ...]) -> bool:
    """Whether this is the flag of a model whose layers (transformers >= 4.53) decide for themselves."""
    below = f"{found.name}." if found.name else ""
    return (
        found.form == "huggingface"
        and found.name not in layers
        and any(name.startswith(below) for name in layers)
    )


class _Walk:
    """The state of one walk."""

    def __init__(self, tree: Tree, unused_marks: bool) -> None:
        self.tree, self.unused_marks = tree, unused_marks
        self.seen: set[int] = set()
        self.open: set[int] = set()
        self.trainable = False
        self.kinds: dict[type, Kind] = {}

    def visit(
        self,
        module: nn.Module,
        name: str,
        parent: Place | None,
        cover: Cover,
        wrappers: tuple[nn.Module, ...] = (),
    ) -> None:
        """Visit a module and all below it; one that was met before leaves an alias only."""
        if id(module) in self.seen:
            if id(module) not in self.open:
                self.tree.aliases.append((name, module))
            return
        self.seen.add(id(module))
        self.open.add(id(module))
        kind = self.kind_of(module)
        cover = self.marked(module, name, kind, cover)
        self.trainable = self.trainable or any(
            each is not None and each.requires_grad for each in parameters_of(module).values()
        )
        inner = wrapped_child(module)
        if inner is not None:
            self.visit(inner, name, parent, cover, (*wrappers, module))
        else:
            place = Place(
                name,
                module,
                kind,
                parent,
                [],
                wrappers,
                cover.compiled,
                cover.checkpointed,
                cover.adapter,
                cover.experts,
                cover.idle,
                self.trainable,
            )
            self.tree.places.append(place)
            if parent:
                parent.children.append(place)
            experts = experts_of(place)
            for child_name, child in children_of(module).items():
                if child is not None:
                    full_name = f"{name}.{child_name}" if name else child_name
                    covered = below(place, child_name, self.kind_of(child), full_name, cover)
                    if child_name in experts:
                        covered = replace(covered, experts=experts[child_name])
                    self.visit(child, full_name, place, covered)
        self.open.discard(id(module))

    def kind_of(self, module: nn.Module) -> Kind:
        """Give the class of a module, the same object for all of its modules."""
        of = type(module)
        if of not in self.kinds:
            self.kinds[of] = Kind(of)
        return self.kinds[of]

    def marked(self, module: nn.Module, name: str, kind: Kind, cover: Cover) -> Cover:
        """Give the cover as this module's own marks change it."""
        checkpointed, flag_above = cover.checkpointed, cover.flag_above
        compiled, watched = self.compiled(module, name, kind, cover)
        found = checkpointing_of(module, name, kind)
        if found:
            self.tree.checkpointing.append(found)
            if found.form in REGIONS or (found.form == "huggingface" and is_layer(kind)):
                checkpointed, flag_above = name, False
            elif found.form == "huggingface":
                flag_above = True
            elif found.form == "called_in_forward" and checkpointed is None:
                checkpointed = NOT_RECORDED
        return Cover(compiled, watched, checkpointed, flag_above, cover.adapter, cover.experts, cover.idle)

    def compiled(self, module: nn.Module, name: str, kind: Kind, cover: Cover) -> tuple[str | None, bool]:
        """Give the region that this module is in, and whether Dynamo watches for one below it."""
        mark = compile_mark(module, name, kind)
        if mark and self.unused_marks:
            self.tree.marks.append(msgspec.structs.replace(mark, compiles=False, unused=True))
            return None, False
        if (
            mark
            and mark.compiles is False
            and is_called(module)
            and (cover.compiled is not None or wrapped_child(module) is not None)
        ):
            # Inside a region it is traced with it; a wrapper's own frame says nothing of what it wraps.
            mark = msgspec.structs.replace(mark, compiles=None if cover.compiled is None else True)
        if mark:
            self.tree.marks.append(mark)
            if mark.compiles is not False:
                return name, False
            return cover.compiled, cover.watched or is_called(module)
        if (cover.compiled is not None or cover.watched) and is_disabled(module, kind):
            return None, False
        if cover.watched and is_called(module) and not forward_of_torch(module):
            return name, False
        return cover.compiled, cover.watched


def adapters_of(module: nn.Module) -> tuple[str, ...]:
    """Name what a tuner of PEFT puts beside the layer that it wraps: ``oft_R``, ``vera_lambda_b``, ..."""
    if "base_layer" not in children_of(module):
        return ()
    named = read_class(type(module), "adapter_layer_names")
    return named if is_a(named, tuple) else ()


def below(place: Place, child_name: str, child: Kind, full_name: str, cover: Cover) -> Cover:
    """Find the cover of a child: blocks under a flagged model and LoRA's parts change it."""
    module, adapter = place.module, cover.adapter
    beside = children_of(module)
    checkpointed, flag_above = cover.checkpointed, cover.flag_above
    if flag_above and is_a(module, nn.ModuleList):
        checkpointed, flag_above = (checkpointed if is_layer(child) else full_name), False
    if adapter != "adapter" and "base_layer" in beside:
        # Around expert weights PEFT nests its wrappers: the base of one holds the adapter of the next.
        adapter = (
            "base"
            if child_name == "base_layer"
            else "adapter"
            if child_name.startswith("lora_") or child_name in adapters_of(module)
            else adapter
        )
    elif adapter is None and child_name in ("lora_a", "lora_b"):
        adapter = "adapter"
    idle = cover.idle or (child_name == "original_module" and "modules_to_save" in beside)
    return Cover(cover.compiled, cover.watched, checkpointed, flag_above, adapter, cover.experts, idle)


def experts_of(place: Place) -> dict[str, int]:
    """Find the children of a module that are experts, some of which a token visits, and tell of how many of
    its class each is; experts that are shared are visited by every token, and none of these.

    The author calls them so, one by one or the list of them, or the module of the list and of a router with
    an output for each is one of experts.
    """
    beside = {name: child for name, child in children_of(place.module).items() if child is not None}
    own = place.name.rpartition(".")[2].lower()
    if "shared" in own:
        return {}
    if is_a(place.module, nn.ModuleList) or is_a(place.module, nn.ModuleDict):
        found = beside if "expert" in own or _has_a_router(place, len(beside)) else {}
    else:
        found = {name: child for name, child in beside.items() if NUMBERED_EXPERT.search(name)}
    alike = Counter(map(type, found.values()))  # NllbMoe keeps a dropout among its experts
    return {name: alike[type(child)] for name, child in found.items()} if len(found) > 1 else {}


def _has_a_router(place: Place, experts: int) -> bool:
    """Whether beside this list, or the module that holds it, stands a router with so many outputs, in a class
    of experts."""
    holder, of_experts = place.parent, False
    for _ in range(2):
        if holder is None:
            return False
        of_experts = of_experts or bool(OF_EXPERTS.search(type(holder.module).__name__))
        if of_experts and any(
            (weight := tensor(child, "weight")) is not None
            and weight.ndim == 2
            and weight.shape[0] == experts
            for name, child in children_of(holder.module).items()
            if child is not None and name.endswith(ROUTERS)
        ):
            return True
        holder = holder.parent
    return False


def wrapped_child(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for every other module."""
    if INNER_NAMES.isdisjoint(children_of(module)):
        return None
    for each in lineage(type(module)):
        if each in WRAPPERS:
            return children_of(module).get(WRAPPERS[each])
    return None


def parameters(tree: Tree) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter under every name it has; a shared one comes more than once."""
    for place in tree.places:
        for owner in (*place.wrappers, place.module):
            for name, parameter in parameters_of(owner).items():
                if parameter is not None:
                    yield (f"{place.name}.{name}" if place.name else name), parameter
    for alias, module in tree.aliases:
        for name, shared in tensors_of(module, "_parameters"):
            yield f"{alias}.{name}", cast("nn.Parameter", shared)
