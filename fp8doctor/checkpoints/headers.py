"""The tensors of a checkpoint by the headers of its files: safetensors, torch.save and DCP.

Sources: https://github.com/huggingface/safetensors#format; torch 2.13: ``torch/serialization.py`` and
``torch/distributed/checkpoint/metadata.py``.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from fp8doctor.checkpoints.pickled import Global, Made, read_pickle
from fp8doctor.errors import UserError

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
