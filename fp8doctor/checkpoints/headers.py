"""The tensors of a checkpoint by the headers of its files: safetensors, torch.save and DCP.

Sources: https://github.com/huggingface/safetensors#format; torch 2.13: ``torch/serialization.py`` and
``torch/distributed/checkpoint/metadata.py``.
"""

from __future__ import annotations

import json
import pickletools
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
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


SAFETENSORS_DTYPES = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}

STORAGES = {
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
}
"""torch's typed storages -> dtype. A storage without a type goes with a dtype of its own."""

LARGEST_HEADER = 100 * 2**20
"""Bytes; safetensors itself reads no longer header. Source: ``MAX_HEADER_SIZE`` of safetensors 0.6."""

LARGEST_PICKLE = 2**30
"""Bytes of a pickle without its tensors. A choice."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")

TE_REDUCE = "_make_float8_tensor_in_reduce_ex"
"""Function that Transformer Engine 2.20 names in a pickled Float8Tensor, in the place of a class method."""

MOST_DEPTH = 8
"""Depth of nested dictionaries in a torch file. A choice."""


class TensorHeader(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    subclass: str = ""
    """Qualified class of a pickled tensor subclass, such as torchao's or Transformer Engine's."""


class Checkpoint(Struct, frozen=True):
    """What the headers of a checkpoint tell."""

    name: str
    form: str
    """``safetensors``, ``torch`` or ``DCP``."""
    tensors: dict[str, TensorHeader]
    others: tuple[str, ...] = ()
    """Names of what is no tensor: ``_extra_state`` as bytes, steps, arguments."""
    metadata: dict[str, str] = {}
    """Of safetensors."""
    config: dict[str, Any] = {}
    """``config.json`` next to it."""
    classes: frozenset[Global] = frozenset()
    """What loading a pickle would import."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a file or folder. Raises `UserError`."""
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    try:
        return _read(path)
    except UserError as error:
        raise UserError(f"cannot read {path} as a checkpoint: {error}") from None
    except (OSError, ValueError, KeyError, struct.error, zipfile.BadZipFile) as error:
        told = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path} as a checkpoint: {told}") from None


def _read(path: Path) -> Checkpoint:
    if path.is_dir():
        config = _json(path / "config.json")
        if (path / ".metadata").is_file():
            return _dcp(path, config)
        files = sorted(path.glob("*.safetensors"))
        if files:
            return _safetensors(path, files, config)
        files = sorted(each for each in path.iterdir() if each.suffix in TORCH_SUFFIXES)
        if not files:
            raise UserError("the folder has no .safetensors, .metadata (DCP), .bin, .pt or .pth file")
        return _torch(path, files, config)
    config = _json(path.parent / "config.json")
    if path.name == ".metadata" or path.suffix == ".distcp":
        return _dcp(path.parent, config)
    if path.suffix == ".safetensors":
        return _safetensors(path, [path], config)
    return _torch(path, [path], config)


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def _safetensors(path: Path, files: list[Path], config: dict[str, Any]) -> Checkpoint:
    tensors: dict[str, TensorHeader] = {}
    metadata: dict[str, str] = {}
    for file in files:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > LARGEST_HEADER:
                raise UserError(f"{file.name} is no safetensors file, or its header is damaged")
            header = json.loads(opened.read(length))
        metadata |= header.pop("__metadata__", None) or {}
        for name, each in header.items():
            dtype = SAFETENSORS_DTYPES.get(each["dtype"], each["dtype"])
            tensors[name] = TensorHeader(dtype, tuple(each["shape"]))
    return Checkpoint(path.name, "safetensors", tensors, metadata=metadata, config=config)


def _dcp(path: Path, config: dict[str, Any]) -> Checkpoint:
    found, _ = read_pickle((path / ".metadata").read_bytes())
    tensors, others = {}, []
    for name, each in found.state["state_dict_metadata"].items():
        if each.of.name == "TensorStorageMetadata":
            dtype, size = each.state["properties"].state, each.state["size"].args[0]
            dtype = dtype["dtype"] if isinstance(dtype, dict) else dtype[0]
            tensors[name] = TensorHeader(dtype.name, tuple(size))
        else:
            others.append(name)
    return Checkpoint(path.name, "DCP", tensors, tuple(others), config=config)


def _torch(path: Path, files: list[Path], config: dict[str, Any]) -> Checkpoint:
    tensors: dict[str, TensorHeader] = {}
    others: list[str] = []
    classes: frozenset[Global] = frozenset()
    for file in files:
        if not zipfile.is_zipfile(file):
            raise UserError(
                f"{file.name} is neither .safetensors nor a file of torch.save since 1.6; an older one: "
                "torch.load and torch.save it once"
            )
        with zipfile.ZipFile(file) as archive:
            inside = next((each for each in archive.infolist() if each.filename.endswith("/data.pkl")), None)
            if inside is None or inside.file_size > LARGEST_PICKLE:
                raise UserError(f"{file.name} holds no data.pkl of torch.save")
            found, named = read_pickle(archive.read(inside))
        classes |= named
        if isinstance(found, Made) and isinstance(found.of, Global) and found.of.name != "OrderedDict":
            raise UserError(
                f"{file.name} is a pickled {found.of}, no dictionary of tensors; save model.state_dict()"
            )
        for name, each in _flat(found, "", MOST_DEPTH):
            if (tensor := _tensor(each)) is not None:
                tensors[name] = tensor
            else:
                others.append(name)
    return Checkpoint(path.name, "torch", tensors, tuple(others), config=config, classes=classes)


def _flat(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries, their names joined by dots."""
    is_dict = isinstance(value, dict) or (isinstance(value, Made) and _called(value) == "OrderedDict")
    entries: Mapping[Any, Any] = value if isinstance(value, dict) else value.entries if is_dict else {}
    if not is_dict or not depth:
        yield name, value
        return
    for key, each in entries.items():
        yield from _flat(each, f"{name}.{key}" if name else str(key), depth - 1)


def _called(made: Made) -> str:
    return made.of.name if isinstance(made.of, Global) else ""


def _tensor(value: Any, subclass: str = "") -> TensorHeader | None:
    """Describe a tensor as torch rebuilds it; None of anything else."""
    if not isinstance(value, Made):
        return None
    args = value.args if isinstance(value.args, tuple) else ()
    match _called(value):
        case "_rebuild_tensor_v2" | "_rebuild_tensor_v3" | "_rebuild_tensor":
            return TensorHeader(_dtype(args), tuple(args[2]), subclass)
        case "_rebuild_parameter" | "_rebuild_parameter_with_state":
            return _tensor(args[0], subclass)
        case "_rebuild_wrapper_subclass":
            return TensorHeader(args[1].name, tuple(args[2]), str(args[0]))
        case "_rebuild_from_type_v2":
            kind = str(args[1])
            return _tensor(Made(args[0], args[2]), "" if kind == "torch.nn.parameter.Parameter" else kind)
    if isinstance(value.of, Made) and _called(value.of) == "getattr":
        return _tensor(Made(value.of.args[0], args))  # a method of the class
    of_library = isinstance(value.of, Global) and not value.of.module.startswith(("torch.", "collections"))
    return _of_library(value) if of_library else None


def _of_library(made: Made) -> TensorHeader | None:
    """Describe a tensor that its library rebuilds itself, by the tensor, dtype and size among its arguments.

    Transformer Engine's Float8Tensor is one.
    """
    args = made.args if isinstance(made.args, tuple) else ()
    inner = next((found for each in args if (found := _tensor(each)) is not None), None)
    dtypes = (each.name for each in args if isinstance(each, Global) and each.module == "torch")
    sizes = (each.args[0] for each in args if isinstance(each, Made) and _called(each) == "Size")
    if inner is None:
        return None
    kind = str(made.of).replace(TE_REDUCE, "Float8Tensor")
    return TensorHeader(next(dtypes, inner.dtype), tuple(next(sizes, inner.shape)), kind)


def _dtype(args: tuple[Any, ...]) -> str:
    """Return the dtype: the storage's, or the one next to a storage without."""
    named = next((each for each in args if isinstance(each, Global) and each.module == "torch"), None)
    if named is not None:
        return str(named.name)
    storage = args[0].name[1]
    return STORAGES.get(storage.name, str(storage.name))
