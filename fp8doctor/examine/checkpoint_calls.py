"""Whether a module's forward calls a checkpoint function, read from its bytecode and the module's flags.

Nothing of it is run. A flag is an attribute such as ``self.grad_checkpointing``: a branch that it closes is
not followed. Methods, nested functions and functions that no library wrote are followed as they are named.
"""

from __future__ import annotations

import builtins
import dis
import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from fp8doctor.stacks.code_names import names_in
from fp8doctor.stacks.looking import forward_of, is_a, is_module, read

_log = logging.getLogger("fp8doctor")

CHECKPOINT_MODULES = (
    "torch.utils.checkpoint",
    "transformer_engine.pytorch.distributed",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "unsloth_zoo.gradient_checkpointing",
)

ENDINGS = ("checkpoint", "checkpoint_sequential", "checkpointfunction", "checkpointer")
"""How their functions end; the others beside them set something, or move tensors."""

LIBRARIES = ("torch.", "transformers.", "accelerate.", "peft.", "transformer_engine.", "torchao.")
"""Whose forwards decide by a flag or a wrapper of their own; only the others are searched for calls."""

MOST_CALLS = 6
"""How deep functions are followed into one another."""

IN_TRAINING: dict[Any, bool] = {
    torch.jit.is_scripting: False,  # type: ignore[attr-defined]
    torch.jit.is_tracing: False,  # type: ignore[attr-defined]
    torch.is_grad_enabled: True,
}
"""What these answer in a step of training."""

PASSING = frozenset(
    (
        "PRECALL",
        "PUSH_NULL",
        "TO_BOOL",
        "EXTENDED_ARG",
        "NOP",
        "NOT_TAKEN",
        "KW_NAMES",
        "SWAP",
        "POP_TOP",
        "COPY",
    )
)
"""Instructions that leave the last value where it is."""

RETURNS = frozenset(("RETURN_VALUE", "RETURN_CONST"))
RAISES = frozenset(("RAISE_VARARGS", "RERAISE"))

UNKNOWN: Any = object()
SUPER: Any = object()


@dataclass(frozen=True)
class Call:
    """A checkpoint function that a forward calls."""

    function: Any
    certain: bool
    """Whether every way through the forward leads there, or a flag of the module asks for it."""
    flag: str | None = None
    """The attribute of the module that asks for it."""


def called_checkpoint(module: Any) -> Call | None:
    """Find the first checkpoint function that the module's forward can reach; None when it reaches none."""
    forward = forward_of(module)
    if not names_checkpoint(forward, type(module)):
        return None
    reader = _Reader()
    try:
        found = reader.follow(forward, module)
        for flag in reader.open if found else ():
            if _Reader(closed=flag).follow(forward, module) is None:
                return Call(found.function, True, flag)  # type: ignore[union-attr]
    except Exception:  # instructions of a Python that is not known here
        _log.debug("a forward cannot be read", exc_info=True)
        return Call(None, False)
    return found


def names_checkpoint(forward: Any, kind: type) -> bool:
    """Whether a forward of this class names a checkpoint function at all, flags aside: most need no closer
    look."""
    return _is_named(forward, kind.__mro__, set())


def is_checkpoint(value: Any) -> bool:
    """Whether this is a function, or an autograd function, that recomputes what it is given."""
    return (
        (is_a(value, FunctionType) or is_a(value, type))
        and value.__module__ in CHECKPOINT_MODULES
        and value.__name__.lower().endswith(ENDINGS)
    )


def wrapped(function: Any) -> Any:
    """Tell what torch.compile, or a library's wrapper, has around; None where this is the user's own
    function."""
    inner = read(function, "_torchdynamo_orig_callable")
    return read(function, "__wrapped__") if inner is None and not _is_own(function) else inner


def _is_own(function: Any) -> bool:
    """Whether no library wrote this function."""
    home = function.__globals__.get("__name__", "") if type(function) is FunctionType else ""
    return type(function) is FunctionType and not f"{home}.".startswith(LIBRARIES)


def _cells(function: FunctionType) -> dict[str, Any]:
    """Say what a function closes over."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _is_named(function: Any, classes: tuple[type, ...], seen: set[int]) -> bool:
    function = read(function, "__func__", function)
    plain = type(function) is FunctionType and not function.__dict__
    if id(function) in seen or (plain and not _is_own(function)):
        return False
    seen.add(id(function))
    held = [read(function, "func"), wrapped(function)]
    if _is_own(function):
        held += _cells(function).values()
        for name in names_in(function.__code__):
            if "checkpoint" in name:
                return True
            held.append(function.__globals__.get(name))
            held += [vars(kind)[name] for kind in classes if name in vars(kind)]
    followed = FunctionType, MethodType, functools.partial
    return any(
        is_checkpoint(each) or (any(is_a(each, kind) for kind in followed) and _is_named(each, classes, seen))
        for each in held
    )


@dataclass(frozen=True)
class _Scope:
    """What the names in a function mean."""

    bound: Mapping[str, Any]
    around: Mapping[str, Any]
    """Of the functions around it."""
    module: Any = None
    """Its first argument, where that is a module."""


@dataclass(frozen=True)
class _Value:
    """What an instruction leaves on the stack."""

    value: Any = UNKNOWN
    flag: str | None = None
    """The attribute of the module that it was read from, where that is set."""


class _Reader:
    """One reading of a forward, with one flag taken for one that is not set."""

    def __init__(self, closed: str | None = None) -> None:
        self._closed = closed
        self._within: list[CodeType] = []
        self.open: dict[str, None] = {}
        """Flags that are set and decided where a branch went, in the order of their reading."""

    def follow(self, function: Any, module: Any = None) -> Call | None:
        """Tell what a function, a method, a partial, or what is wrapped there calls."""
        if is_checkpoint(function):
            return Call(function, True)
        if type(function) is MethodType:
            return self.follow(function.__func__, function.__self__)
        if issubclass(type(function), functools.partial):
            return self.follow(function.func)
        if (inner := wrapped(function)) is not None:
            return self.follow(inner, module)
        if not _is_own(function):
            return None
        scope = _Scope(function.__globals__, _cells(function), module if is_module(module) else None)
        return self._code(function.__code__, scope)

    def _code(self, code: CodeType, scope: _Scope) -> Call | None:
        """Walk every way that no flag closes, then every way past the calls that are certain."""
        if code in self._within or len(self._within) >= MOST_CALLS:
            return None
        self._within.append(code)
        frame, found = _Frame(code, scope, self._closed), {}
        for index in sorted(self._walk(frame, frozenset())):
            if call := self._at(frame, index):
                found[index] = call
        self._within.pop()
        certain = frozenset(index for index, call in found.items() if call.certain)
        past = self._walk(frame, certain) - certain
        avoidable = any(frame.instructions[index].opname in RETURNS for index in past)
        return Call(next(iter(found.values())).function, not avoidable) if found else None

    def _at(self, frame: _Frame, index: int) -> Call | None:
        made, value = frame.instructions[index].argval, frame.values[index].value
        if isinstance(made, CodeType):
            return self._code(made, frame.within)
        return None if value is UNKNOWN or is_module(value) else self.follow(value)

    def _walk(self, frame: _Frame, stops: frozenset[int]) -> set[int]:
        """Indices of the instructions that are reached without passing one of ``stops``."""
        seen: set[int] = set()
        left = [0]
        while left:
            index = left.pop()
            if index not in seen:
                seen.add(index)
                left += () if index in stops else frame.after(index, self.open)
        return seen


class _Frame:
    """The instructions of one function, and what each leaves on the stack as far as names tell."""

    def __init__(self, code: CodeType, scope: _Scope, closed: str | None) -> None:
        self._code, self._scope, self._closed = code, scope, closed
        self.instructions = list(dis.get_instructions(code))
        self._places = {each.offset: index for index, each in enumerate(self.instructions)}
        self._named = {name: _Value(value) for name, value in scope.around.items()}
        if scope.module is not None and code.co_varnames:
            self._named[code.co_varnames[0]] = _Value(scope.module)
        stored = [each.argval for each in self.instructions if each.opname.startswith("STORE_")]
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self._once = {name for name in stored if stored.count(name) == 1}.difference(arguments)
        self.values: list[_Value] = []
        last = _Value()
        for index, each in enumerate(self.instructions):
            last = self._met(index, last) if each.is_jump_target else last
            last = last if each.opname in PASSING or "JUMP" in each.opname else self._value(each, last)
            self.values.append(last)

    @property
    def within(self) -> _Scope:
        """The scope of a function that is made here."""
        return _Scope(self._scope.bound, {name: each.value for name, each in self._named.items()})

    def after(self, index: int, opened: dict[str, None]) -> list[int]:
        """Tell where an instruction leads; a loop is taken to run at least once, and nothing to raise."""
        instruction = self.instructions[index]
        name = instruction.opname
        if name in RETURNS or name in RAISES:
            return []
        if "JUMP" not in name:
            return [index + 1]
        target = self._places[instruction.argval]
        if "_IF_" not in name:
            loop = self.instructions[target]
            return [target + 1, self._places[loop.argval]] if loop.opname == "FOR_ITER" else [target]
        condition = self.values[index]
        taken = _taken(condition.value, name)
        if taken is None:
            return [index + 1, target]
        if condition.flag is not None:
            opened[condition.flag] = None
        return [target if taken else index + 1]

    def _met(self, index: int, last: _Value) -> _Value:
        """Tell what is on the stack where ways meet: of ``a and b`` the part that decides, else nothing
        known."""
        known = False
        for number, each in enumerate(self.instructions[:index]):
            keeps = each.opname.endswith("OR_POP") or (
                "_IF_" in each.opname
                and any(of.opname == "COPY" for of in self.instructions[number - 2 : number])
            )
            if keeps and self._places[each.argval] == index:
                known, taken = True, _taken(self.values[number].value, each.opname)
                if taken is not False:
                    return self.values[number] if taken else _Value()
        return last if known else _Value()

    def _value(self, instruction: dis.Instruction, last: _Value) -> _Value:
        """Tell what an instruction leaves on the stack, known what the one before it left."""
        name, argument = instruction.opname, instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            return _Value(self._scope.bound.get(argument, vars(builtins).get(argument, UNKNOWN)))
        if name in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
            return self._attribute(SUPER if name == "LOAD_SUPER_ATTR" else last.value, argument)
        if name.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            return self._named.get(argument[-1] if isinstance(argument, tuple) else argument, _Value())
        if name == "IMPORT_NAME":
            whole = argument if last.value else argument.partition(".")[0]
            return _Value(sys.modules.get(whole, UNKNOWN))
        if name == "LOAD_CONST" and (argument is None or type(argument) is tuple):
            return _Value(argument)
        if name == "UNARY_NOT" and type(last.value) is bool:
            return _Value(not last.value, last.flag)
        if name == "CALL" and instruction.arg == 0 and last.value is super:
            return _Value(SUPER)
        if name == "CALL" and instruction.arg == 0 and callable(last.value):
            return _Value(next((known for each, known in IN_TRAINING.items() if each is last.value), UNKNOWN))
        if name in ("STORE_FAST", "STORE_DEREF") and argument in self._once:
            self._named[argument] = last
        return _Value()

    def _attribute(self, of: Any, name: str) -> _Value:
        if of is UNKNOWN:
            return _Value()
        if of is SUPER:
            return _Value(self._inherited(name))
        if is_a(of, ModuleType):
            return _Value(vars(of).get(name, UNKNOWN))
        value = read(of, name, UNKNOWN)
        if value is True and of is self._scope.module and name != "training":
            return _Value(False) if name == self._closed else _Value(True, name)
        return _Value(value)

    def _inherited(self, name: str) -> Any:
        """Tell what ``super().name`` is in this function."""
        mro = type(self._scope.module).__mro__
        owners = (
            number
            for number, kind in enumerate(mro)
            if any(read(each, "__code__") is self._code for each in vars(kind).values())
        )
        for kind in mro[next(owners, len(mro)) + 1 :]:
            if isinstance(found := vars(kind).get(name), FunctionType):
                return MethodType(found, self._scope.module)
        return UNKNOWN


def _taken(condition: Any, jump: str) -> bool | None:
    """Whether a conditional jump is taken; None where only a run tells."""
    if condition is UNKNOWN:
        return None
    if jump.endswith("NOT_NONE"):
        return condition is not None
    if jump.endswith("NONE"):
        return condition is None
    if condition is not None and type(condition) is not bool:
        return None
    return bool(condition) is ("IF_TRUE" in jump)
