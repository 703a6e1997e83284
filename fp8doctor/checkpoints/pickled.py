"""What a pickle would make, read from its opcodes; nothing of it is imported or called."""

from __future__ import annotations

import pickletools
from typing import Any, NamedTuple

from msgspec import Struct

from fp8doctor.errors import UserError


class Global(NamedTuple):
    """A class or function that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made(Struct, eq=False):
    """An object that the pickle would make: what is called, with what, and its state and entries."""

    of: Any
    args: Any = ()
    state: Any = None
    entries: dict[Any, Any] = {}


class _Persistent(NamedTuple):
    name: Any


PUSHED = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE
    BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    """.split()
)
"""Opcodes whose argument is the value."""

VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
NOTHING = frozenset(("PROTO", "FRAME", "READONLY_BUFFER"))


class _Machine:
    """The stack of a pickle. A code of one letter means what it means in pickletools."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: set[Global] = set()

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        found, self.stack[start:] = self.stack[start:], []
        return found

    def named(self, module: str, name: str) -> Global:
        found = Global(module, name)
        self.globals.add(found)
        return found

    def step(self, code: str, arg: Any) -> None:
        stack = self.stack
        if code in PUSHED:
            stack.append(arg)
        elif code in VALUES:
            stack.append(VALUES[code])
        elif code in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append({} if code == "EMPTY_DICT" else [])
        elif code in TUPLES:
            found, stack[-TUPLES[code] :] = tuple(stack[-TUPLES[code] :]), []
            stack.append(found)
        elif code == "MARK":
            self.marks.append(len(stack))
        elif code in ("TUPLE", "LIST", "FROZENSET"):
            stack.append(self.since_mark() if code == "LIST" else tuple(self.since_mark()))
        elif code in ("APPEND", "APPENDS", "ADDITEMS"):
            added = [stack.pop()] if code == "APPEND" else self.since_mark()
            if isinstance(stack[-1], list):
                stack[-1] += added
        elif code in ("SETITEM", "SETITEMS", "DICT"):
            self.set(code)
        elif code in ("GLOBAL", "INST"):
            found = self.named(*arg.split(" ", 1))
            stack.append(found if code == "GLOBAL" else Made(found, tuple(self.since_mark())))
        elif code == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(self.named(str(module), str(name)))
        elif code in ("REDUCE", "NEWOBJ"):
            args, of = stack.pop(), stack.pop()
            stack.append(Made(of, args, entries={}))
        elif code == "NEWOBJ_EX":
            _, args, of = stack.pop(), stack.pop(), stack.pop()
            stack.append(Made(of, args, entries={}))
        elif code == "OBJ":
            of, *args = self.since_mark()
            stack.append(Made(of, tuple(args), entries={}))
        elif code == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Made):
                stack[-1].state = state
        elif code in ("PERSID", "BINPERSID"):
            stack.append(_Persistent(stack.pop() if code == "BINPERSID" else arg))
        elif code in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[int(arg)] = stack[-1]
        elif code == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif code in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[int(arg)])
        elif code == "DUP":
            stack.append(stack[-1])
        elif code == "POP":
            stack.pop()
        elif code == "POP_MARK":
            self.since_mark()
        elif code not in NOTHING:
            stack.append(Made(code))  # an extension or a buffer, of which nothing can be told

    def set(self, code: str) -> None:
        """Carry out SETITEM, SETITEMS or DICT; keys that a dict cannot have are left out."""
        pairs = self.stack[-2:] if code == "SETITEM" else self.since_mark()
        if code == "SETITEM":
            del self.stack[-2:]
        if code == "DICT":
            self.stack.append({})
        into = self.stack[-1].entries if isinstance(self.stack[-1], Made) else self.stack[-1]
        if isinstance(into, dict):
            into.update(
                (key, value)
                for key, value in zip(pairs[::2], pairs[1::2], strict=False)
                if isinstance(key, (str, int))
            )


def read_pickle(data: bytes) -> tuple[Any, frozenset[Global]]:
    """Return what the first pickle in ``data`` would make, and all names that it would import.

    Raises `UserError`.
    """
    machine = _Machine()
    try:
        for opcode, arg, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.stack[-1], frozenset(machine.globals)
            machine.step(opcode.name, arg)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"its pickle is damaged: {error}") from None
    raise UserError("its pickle does not end")
