"""Everything that can be reached from an object, read bit by bit without running any of its code."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.nn.parameter import UninitializedTensorMixin

from tests.process_state import process_state

State = dict[str, Any]
"""Where something was found -> what is compared of it."""

SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
PLAIN = (int, float, str, bytes, bool, complex)
SHARED = (types.ModuleType, types.CodeType, type, types.BuiltinFunctionType)
"""What everybody holds, and what is no state of the user's."""


def everything(*roots: Any) -> State:
    """The state of all that these objects hold, by the way to it."""
    found: State = {}
    seen: set[int] = set()
    waiting = deque((f"{number}", root) for number, root in enumerate(roots))
    while waiting:
        way, value = waiting.popleft()
        kind = type(value)
        if id(value) in seen or issubclass(kind, SHARED):
            continue
        seen.add(id(value))
        found[way] = (kind.__qualname__, _identity(kind, value), _content(kind, value))
        waiting.extend((f"{way}{step}", inner) for step, inner in _inside(kind, value))
    return found


def surroundings() -> State:
    """Random numbers of torch, Python and NumPy, the environment, and the settings of the process."""
    return {
        "torch's random numbers": _bits(torch.get_rng_state()),
        "Python's random numbers": hash(random.getstate()),
        "NumPy's random numbers": str(numpy.random.get_state()),
        "the environment": dict(os.environ),
        "the current folder": os.getcwd(),
        **process_state(),
    }


def settings() -> State:
    """`surroundings`, and what less is set of the process, torch and torch.compile."""
    backends = torch.backends
    root = logging.getLogger()
    return {
        **surroundings(),
        "inference mode": torch.is_inference_mode_enabled(),
        "NaNs in anomaly mode": torch.is_anomaly_check_nan_enabled(),
        "deterministic, warning only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "deterministic fill": torch.utils.deterministic.fill_uninitialized_memory,
        "precision": (backends.fp32_precision, backends.cuda.matmul.fp32_precision),
        "precision on a CPU": backends.mkldnn.matmul.fp32_precision,
        "reduced precision": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cuDNN": (backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cudnn.enabled),
        "autocast on CUDA": torch.is_autocast_enabled("cuda"),
        "autocast dtypes": [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "the recursion limit": sys.getrecursionlimit(),
        "arguments": list(sys.argv),
        "streams": (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        "logging": (root.level, list(root.handlers), root.manager.disable),
        "warnings": (list(warnings.filters), id(warnings.showwarning)),
        "CUDA": torch.cuda.is_initialized(),
    }


def differences(before: State, after: State) -> list[str]:
    """Ways to what is not as it was."""
    return [way for way in {**before, **after} if before.get(way) != after.get(way)]


def _identity(kind: type, value: Any) -> Any:
    """Which object it is, and where the data of a tensor lies."""
    return (id(value), _place(value)) if issubclass(kind, torch.Tensor) else id(value)


def _place(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().data_ptr() if _is_plain(tensor) else None


def _content(kind: type, value: Any) -> Any:
    """What is compared of one object, beside what it holds."""
    if issubclass(kind, torch.Tensor):
        return _of_tensor(value)
    if issubclass(kind, torch.Generator):
        return _bits(value.get_state())
    if issubclass(kind, random.Random):
        return hash(value.getstate())
    if issubclass(kind, numpy.random.Generator):
        return str(value.bit_generator.state)
    if issubclass(kind, numpy.ndarray):
        return value.tobytes()
    if issubclass(kind, dict):
        return [(_key(key), id(held)) for key, held in dict.items(value)]
    if issubclass(kind, SEQUENCES):
        return [id(each) for each in _elements(value)]
    if issubclass(kind, SETS):
        return {id(each) for each in set(value)}
    return value if kind in PLAIN else None


def _inside(kind: type, value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds."""
    if issubclass(kind, torch.Tensor):
        names = ["_backward_hooks", "_post_accumulate_grad_hooks", *(["grad"] if value.is_leaf else [])]
        names += value.__tensor_flatten__()[0] if hasattr(kind, "__tensor_flatten__") else []
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif issubclass(kind, dict):
        yield from ((f"[{_key(key)}]", held) for key, held in dict.items(value))
    elif issubclass(kind, SEQUENCES):
        yield from ((f"[{at}]", held) for at, held in enumerate(_elements(value)))
    elif kind is types.FunctionType:
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        yield from ((f".closure[{at}]", cell.cell_contents) for at, cell in enumerate(cells))
    elif kind is types.MethodType:
        yield from ((".__func__", value.__func__), (".__self__", value.__self__))
    elif issubclass(kind, torch.jit.RecursiveScriptModule):
        for held in (torch._C.ParameterDict(value._c), torch._C.BufferDict(value._c)):
            yield from ((f".{name}", inner) for name, inner in held.items())
    for name, inner in _attributes(value).items():
        yield f".{name}", inner


def _elements(value: Any) -> list[Any]:
    """The elements of a list, tuple or deque, whatever its class makes of iterating."""
    return next(kind for kind in SEQUENCES if isinstance(value, kind)).__iter__(value)  # type: ignore[attr-defined]


def _attributes(value: Any) -> dict[str, Any]:
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held if type(held) is dict else {}


def _of_tensor(tensor: torch.Tensor) -> Any:
    """Version, flags, and the bits of a plain one; what a subclass wraps is looked at by itself."""
    if issubclass(type(tensor), UninitializedTensorMixin):
        return tensor.requires_grad
    flags = (tensor._version, tensor.requires_grad, tensor.dtype, tuple(tensor.shape), tensor.device.type)
    return flags, _bits(tensor) if _is_plain(tensor) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has data of its own that can be read."""
    kind = type(tensor)
    wraps = hasattr(kind, "__tensor_flatten__") or issubclass(kind, UninitializedTensorMixin)
    return not wraps and not tensor.is_meta and tensor.layout is torch.strided


def _bits(tensor: torch.Tensor) -> bytes:
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=8).digest()


def _key(key: Any) -> Any:
    return key if key is None or type(key) in PLAIN else f"{type(key).__qualname__} {id(key)}"
