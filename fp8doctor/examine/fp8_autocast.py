"""Whether the step opens an FP8 autocast around Transformer Engine's layers, read from its code.

Nothing of it is run. Without a training step of the user's the loop is elsewhere, and nobody knows.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from fp8doctor.examine.checkpointing import TRANSFORMER_ENGINE, package
from fp8doctor.examine.walk import Tree
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import names_in, owners
from fp8doctor.stacks.lineage import ancestor, home
from fp8doctor.stacks.looking import children_of, is_a, is_module, read, read_class, state_of
from fp8doctor.stacks.transformer_engine import autocast_is_open

FACT = "training.fp8_autocast"
QUIET = ("torch.", "transformers.", f"{TRANSFORMER_ENGINE}.")
"""Libraries whose modules open no FP8 autocast in their forwards."""
HARMLESS = frozenset(
    ("torch", "numpy", "einops", "fp8doctor", TRANSFORMER_ENGINE, "builtins", *sys.stdlib_module_names)
)
"""Packages whose functions open none when they are called."""
LIGHTNING = ("lightning.", "pytorch_lightning.")
"""The two packages of Lightning, whose plugin ``TransformerEnginePrecision`` opens it around the step."""
INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders that libraries are installed in."""
ENTERS = frozenset(("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"))
"""Instructions that enter a context (Python 3.10 to 3.14)."""
ENTERING = frozenset(("enter_context", "enter_async_context", "__enter__"))
"""Methods that enter one."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Where an ``nn.Module`` keeps what it calls around its forward."""
UNNAMED = frozenset(("forward", "__call__", "__enter__", "__iter__", "__next__", "__getitem__"))
"""Methods that run where nothing names them."""
MAKERS = ("__init__", "__new__", "__post_init__")
"""Methods that run where a class is called."""
DATA = frozenset((bool, int, float, complex, str, bytes))
MOST = 3_000
"""Functions that are read; with more it is unknown. A choice: files of models name some dozens."""


def names_fp8_autocast(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Whether the step names an FP8 autocast, or one is open now: False when all of it was read and nothing
    does, None without layers of Transformer Engine, ``NOT_RECORDED`` where it cannot be read."""
    modules = [module for place in tree.places for module in (*place.wrappers, place.module)]
    if not any(home(type(each)).startswith(f"{TRANSFORMER_ENGINE}.") for each in modules):
        return None
    reader = _Reader()
    for each in (*modules, job.training_step):
        reader.follow(each)
    reader.finish()
    if reader.named or job.around is not nullcontext or autocast_is_open():
        return True
    if job.training_step is None:
        gaps[FACT] = "who trains this model, inside te.autocast or not, is told by no training_step"
        return NOT_RECORDED
    if any(ancestor(type(tree.root.module), each, ("LightningModule",)) for each in LIGHTNING):
        gaps[FACT] = "a Trainer of Lightning opens te.autocast around the step where its precision says so"
        return NOT_RECORDED
    if reader.unread:
        gaps[FACT] = f"whether {reader.unread}, which the step uses, opens te.autocast cannot be read"
        return NOT_RECORDED
    return False


class _Reader:
    """One reading of the user's code, and of what it names.

    What a name is read from is not known: it is looked up in every class, object and module that was met.
    """

    def __init__(self) -> None:
        self.named = False
        self.unread = ""
        """A name that cannot be followed."""
        self._met: dict[int, Any] = {}
        """What was met by its id; kept, so that nothing else gets that id."""
        self._pending: list[Any] = []
        self._functions: list[CodeType] = []
        """What was read."""
        self._names: set[str] = set(UNNAMED)
        self._holders: list[Mapping[str, Any]] = []
        """Attributes of the classes, objects and Python modules that were met."""
        self._held: set[type] = set()
        self._foreign: list[type] = []
        """Classes of libraries of which an object was met."""

    def finish(self) -> None:
        """Read all that was met, and follow all names, until there is nothing new."""
        before = None
        while before != (before := (len(self._met), len(self._names))):
            while self._pending and not self.named:
                self._look_into(self._pending.pop())
            for holder in self._holders:
                for name in self._names & holder.keys():
                    self.follow(holder[name])
        for kind in self._foreign:
            if any(is_a(read_class(kind, name), FunctionType) for name in self._names - UNNAMED):
                self._leave(kind.__name__)

    def follow(self, value: Any) -> None:
        """Have what may run where this is used read."""
        if value is None or type(value) in DATA or id(value) in self._met:
            return
        self._met[id(value)] = value
        self._pending.append(value)

    def _look_into(self, value: Any) -> None:
        if is_a(value, FunctionType):
            self._follow_function(value)
        elif is_module(value):
            self._follow_layer(value)
        elif is_a(value, ModuleType):
            self._follow_import(value.__name__)
        elif is_a(value, type):
            self._follow_class(value)
        else:
            self._follow_object(value)

    def _follow_function(self, function: FunctionType) -> None:
        """Read a function, of a compiled one the original, and what it wraps."""
        if package(function) in HARMLESS:
            return
        original = read(function, "_torchdynamo_orig_callable")
        for each in (original, read(function, "__wrapped__")):
            self.follow(each)
        if original is None and len(self._functions) < MOST:
            self._read(function, function.__code__)
        elif original is None:
            self._leave(f"more than {MOST:,} functions")

    def _follow_layer(self, layer: nn.Module) -> None:
        """Follow the forward and the hooks of a module, its class where that is the user's, and all in it."""
        state = state_of(layer)
        hooks = (hook for held in HOOKS for hook in state.get(held, {}).values())
        for each in (state.get("forward"), *hooks, *children_of(layer).values()):
            self.follow(each)
        if not home(type(layer)).startswith(QUIET):
            self._hold(type(layer))
            self._holders.append(state)

    def _follow_import(self, name: str) -> None:
        """Follow a Python module by its name, where the user wrote it."""
        if name.partition(".")[0] in HARMLESS:
            return
        module = sys.modules.get(name)
        if module is None or of_a_library(name):
            self._leave(name)
        else:
            self._holders.append(vars(module))

    def _follow_class(self, kind: type) -> None:
        if package(kind) not in HARMLESS and not of_a_library(kind.__module__):
            self._hold(kind)
            for name in MAKERS:
                self.follow(read_class(kind, name))

    def _follow_object(self, value: Any) -> None:
        for each in behind(value):
            self.follow(each)
        kind, state = type(value), state_of(value)
        if package(kind) in HARMLESS:
            self._holders += [state] if state else []
        elif of_a_library(kind.__module__):
            self._foreign.append(kind)
            if callable(value):
                self._leave(kind.__name__)
        else:
            self._hold(kind)
            self._holders.append(state)

    def _hold(self, kind: type) -> None:
        """Keep a class of the user's, and those that it derives from."""
        for each in kind.__mro__:
            if each not in self._held and not home(each).startswith(QUIET) and package(each) not in HARMLESS:
                self._held.add(each)
                self._holders.append(vars(each))

    def _read(self, function: FunctionType, code: CodeType) -> None:
        self._functions.append(code)
        bound, names = function.__globals__, set(names_in(code))
        if "getattr" in names:
            names |= set(texts(code))
        of_torch = {name for name in names if package(bound.get(name)) == "torch"}
        said = {name for name in names if "autocast" in name.lower() or "fp8" in name.lower()}
        if said - {"autocast"} or not of_torch.issuperset(owners("autocast", code)):
            self.named = True
        self._names |= names
        cells = (cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)())
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for value in (*(bound[name] for name in names & bound.keys()), *cells, *defaults):
            self.follow(value)
        for name in imported(code):
            self._follow_import(name)
        for name in (*unknown_contexts(code, of_torch), *sorted(names & ENTERING)):
            self._leave(name)

    def _leave(self, name: str) -> None:
        self.unread = self.unread or name


def behind(value: Any) -> Iterator[Any]:
    """Yield what runs when this is called, or what it holds."""
    yield read(value, "__wrapped__")
    if is_a(value, staticmethod) or is_a(value, classmethod):
        yield value.__func__
    elif is_a(value, property):
        yield value.fget
    elif is_a(value, functools.cached_property):
        yield value.func
    elif is_a(value, functools.partial) or is_a(value, functools.partialmethod):
        yield from (value.func, *value.args, *value.keywords.values())
    elif is_a(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif is_a(value, dict):
        yield from dict.values(value)
    elif type(value) in (list, tuple, set, frozenset):
        yield from value


def of_a_library(name: str) -> bool:
    """Whether a Python module lies where libraries are installed."""
    file = read(sys.modules.get(name), "__file__")
    return isinstance(file, str) and not INSTALLED.isdisjoint(Path(file).parts)


def imported(code: CodeType) -> Iterator[str]:
    """Yield the modules that a function, and those inside it, import."""
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            yield str(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from imported(constant)


def texts(code: CodeType) -> Iterator[str]:
    """Yield the names among the strings of a function, and of those inside it, for ``getattr`` to look up."""
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, CodeType):
            yield from texts(constant)


def unknown_contexts(code: CodeType, of_torch: set[str]) -> list[str]:
    """List what a function names where it enters a context that is not visibly torch's."""
    instructions = list(dis.get_instructions(code))
    lines = {each.positions.lineno for each in instructions if each.opname in ENTERS and each.positions}
    named = [
        str(each.argval)
        for each in instructions
        if each.positions and each.positions.lineno in lines
        if each.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"))
    ]
    inner = [
        name
        for each in code.co_consts
        if isinstance(each, CodeType)
        for name in unknown_contexts(each, of_torch)
    ]
    return [name for name in named if name not in of_torch] + inner
