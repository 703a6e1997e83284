"""Whether the step opens an FP8 autocast around Transformer Engine's layers, read from its code.

Nothing of it is run. Without a training step of the user's the loop is elsewhere, and nobody knows.
"""

from __future__ import annotations

import dis
import sys
from contextlib import nullcontext
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fp8doctor.examine.checkpointing import TRANSFORMER_ENGINE, package
from fp8doctor.examine.compile_marks import chain
from fp8doctor.examine.walk import Tree
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.loading.job import Job
from fp8doctor.stacks.code_names import names_in, owners
from fp8doctor.stacks.lineage import home
from fp8doctor.stacks.looking import forward_of, is_a, is_module, read, read_class

FACT = "training.fp8_autocast"
QUIET = ("torch.", "transformers.", f"{TRANSFORMER_ENGINE}.")
"""Libraries whose modules open no FP8 autocast in their forwards."""
HARMLESS = frozenset(("torch", "numpy", "einops", TRANSFORMER_ENGINE, "builtins", *sys.stdlib_module_names))
"""Packages whose functions open none when they are called."""
ENTERS = frozenset(("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"))
"""Instructions that enter a context (Python 3.10 to 3.14)."""


def names_fp8_autocast(tree: Tree, job: Job, gaps: dict[str, str]) -> Any:
    """Whether the step names an FP8 autocast: False when all of it was read and nothing does, None without
    layers of Transformer Engine, ``NOT_RECORDED`` where it cannot be read."""
    modules = [module for place in tree.places for module in (*place.wrappers, place.module)]
    if not any(home(type(each)).startswith(f"{TRANSFORMER_ENGINE}.") for each in modules):
        return None
    reader = _Reader()
    own = {type(each): each for each in modules if not home(type(each)).startswith(QUIET)}
    for each in own.values():
        reader.read(forward_of(each), type(each))
    reader.read(forward_of(tree.root.module), type(tree.root.module))
    reader.read(job.training_step)
    if reader.named or job.around is not nullcontext:
        return True
    if job.training_step is None:
        gaps[FACT] = "who trains this model, inside te.autocast or not, is told by no training_step"
        return NOT_RECORDED
    if reader.unread:
        gaps[FACT] = f"whether {reader.unread}, which the step uses, opens te.autocast cannot be read"
        return NOT_RECORDED
    return False


class _Reader:
    """One reading of the user's functions and of those of theirs that they name."""

    def __init__(self) -> None:
        self.named = False
        self.unread = ""
        """A name that cannot be followed."""
        self._seen: set[CodeType] = set()

    def read(self, function: Any, kind: type = object) -> None:
        """Read a function and its wrappers, and what they name of the user's own; ``kind`` is the class of
        which it may be a method."""
        for link in chain(function):
            link = read(link, "_torchdynamo_orig_callable", link)
            link = read(link, "__func__", link)
            code = read(link, "__code__")
            if isinstance(code, CodeType) and code not in self._seen:
                self._seen.add(code)
                self._read(link, code, kind)

    def _read(self, function: FunctionType, code: CodeType, kind: type) -> None:
        bound, names = function.__globals__, set(names_in(code))
        of_torch = {name for name in names if package(bound.get(name)) == "torch"}
        said = {name for name in names if "autocast" in name.lower() or "fp8" in name.lower()}
        if said - {"autocast"} or not of_torch.issuperset(owners("autocast", code)):
            self.named = True
        cells = (cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)())
        for value in (*(bound[name] for name in names & bound.keys()), *cells):
            self._follow(value)
        for name in names:
            if is_a(method := read_class(kind, name), FunctionType):
                self.read(method, kind)
        if unread := unknown_contexts(code, of_torch):
            self.unread = unread[0]

    def _follow(self, value: Any) -> None:
        if is_a(value, FunctionType) and package(value) not in HARMLESS:
            self.read(value)
        elif is_module(value):
            self.read(forward_of(value), type(value))
        elif package(value) not in HARMLESS and may_open(value):
            self.unread = str(read(value, "__name__", type(value).__name__))


def may_open(value: Any) -> bool:
    """Whether this is a module, or an object that can be called, of which nothing was read."""
    return is_a(value, ModuleType) or (callable(value) and not is_a(value, type))


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
