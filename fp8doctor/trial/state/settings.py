"""Read process-wide settings of Python, torch, torch.compile and Transformer Engine, and put them back.

Reading changes nothing: it makes no CUDA context and imports no package. A setting that this torch or machine
lacks is left out. A setting is written only if it differs.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from fp8doctor.stacks import te_private, torch_private
from fp8doctor.trial.state.users import Contents, contents, restore

_log = logging.getLogger("fp8doctor")

AUTOCAST_DEVICES = ("cpu", "cuda")

FLAGS = """
    fp32_precision cuda.matmul.fp32_precision cudnn.fp32_precision cudnn.conv.fp32_precision
    cudnn.rnn.fp32_precision mkldnn.fp32_precision mkldnn.matmul.fp32_precision mkldnn.conv.fp32_precision
    mkldnn.rnn.fp32_precision cuda.matmul.allow_tf32 cuda.matmul.allow_fp16_reduced_precision_reduction
    cuda.matmul.allow_bf16_reduced_precision_reduction cuda.matmul.allow_fp16_accumulation cudnn.allow_tf32
    cudnn.enabled cudnn.benchmark cudnn.benchmark_limit cudnn.deterministic mkldnn.enabled
    mkldnn.deterministic
""".split()
"""Attributes of ``torch.backends``. A flag that cannot be read is left out, as ``allow_tf32`` may be since
torch 2.9, which also has ``fp32_precision``."""

ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
"""``torch.backends.cuda.NAME_enabled`` and ``enable_NAME``."""

HANDLERS = "signal handlers"
"""Name of the setting that is put back first, so that signals can be deferred."""

PASSES = 3
"""Passes over the settings: precision settings change each other."""


Setting = tuple[str, Callable[[], Any], Callable[[Any], object]]
"""Name in a report, and functions to read and to write it."""


def read() -> dict[str, Any]:
    """Read every readable setting, by its name."""
    values = {}
    for name, read_it, _ in _settings():
        try:
            values[name] = read_it()
        except Exception:
            _log.debug("%s cannot be read", name, exc_info=True)
    return values


def put_back(before: Mapping[str, Any]) -> None:
    """Write every setting that differs from ``before``."""
    for _ in range(PASSES):
        now = read()
        changed = [
            (name, write)
            for name, _, write in _settings()
            if name in before and not alike(before[name], now.get(name))
        ]
        for name, write in changed:
            try:
                write(before[name])
            except Exception:
                _log.debug("%s cannot be put back", name, exc_info=True)
        if not changed:
            break


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name the settings that changed; those with a common first part once."""
    changed = (name for name, value in before.items() if not alike(value, after.get(name)))
    return list(dict.fromkeys(name.partition(":")[0] for name in changed))


def alike(a: Any, b: Any) -> bool:
    """Return whether two values, which may hold tensors and arrays, are the same.

    The same object is not read: it may hold NaN, or be on a GPU that is lost.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _settings() -> Iterator[Setting]:
    yield from _of_python()
    yield from _random_numbers()
    yield from _of_torch()
    yield from _of_libraries()


def _of_python() -> tuple[Setting, ...]:
    return (
        ("environment variables", lambda: dict(os.environ), _write_environment),
        ("sys.path", lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
        ("garbage collection", lambda: (gc.isenabled(), gc.get_threshold()), _write_collection),
        (HANDLERS, lambda: {each: signal.getsignal(each) for each in signal.valid_signals()}, write_handlers),
    )


def _write_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update({name: text for name, text in value.items() if os.environ.get(name) != text})


def _write_collection(value: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


def write_handlers(value: Mapping[int, Any]) -> None:
    """Set signal handlers, which only the main thread may do."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in value.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _random_numbers() -> Iterator[Setting]:
    yield "random numbers: Python", random.getstate, random.setstate
    yield "random numbers: torch", torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield "random numbers: CUDA", torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    if numpy := sys.modules.get("numpy"):
        yield "random numbers: NumPy", numpy.random.get_state, numpy.random.set_state


def _of_torch() -> Iterator[Setting]:
    yield "the default dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "the default device", torch_private.default_device, torch.set_default_device
    yield "grad mode", torch.is_grad_enabled, torch.set_grad_enabled
    yield (
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    )
    name = "deterministic algorithms"
    yield name, torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield _attribute(f"{name}: fill", "utils.deterministic.fill_uninitialized_memory")
    name = "precision and backend flags"
    yield f"{name}: matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for flag in FLAGS:
        yield _attribute(f"{name}: {flag}", f"backends.{flag}")
    for kind in ATTENTION:
        yield f"{name}: {kind}", partial(_sdp, f"{kind}_enabled"), partial(_sdp, f"enable_{kind}")
    yield "the number of threads", torch.get_num_threads, torch.set_num_threads
    for name, hooks in list(vars(torch.nn.modules.module).items()):
        if name.startswith("_global_") and isinstance(hooks, dict):
            yield f"global module hooks: {name}", partial(dict, hooks), partial(_refill, hooks)
    for device in AUTOCAST_DEVICES:
        get, put = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield f"autocast: {device}", get, put
        get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
        yield f"autocast: {device} dtype", partial(get_dtype, device), partial(set_dtype, device)
    yield "autocast: cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled


def _attribute(name: str, path: str) -> Setting:
    """Make the setting of an attribute at a dotted path in torch."""
    holder, _, attribute = path.rpartition(".")
    of = attrgetter(holder)
    return name, lambda: getattr(of(torch), attribute), lambda value: setattr(of(torch), attribute, value)


def _sdp(function: str, *arguments: Any) -> Any:
    return getattr(torch.backends.cuda, function)(*arguments)


def _refill(mapping: dict[Any, Any], value: Mapping[Any, Any]) -> None:
    mapping.clear()
    mapping.update(value)


def _of_libraries() -> tuple[Setting, ...]:
    """Return what a library keeps elsewhere or has not loaded as None, which nothing writes."""
    counters, metrics = torch_private.all_counters(), torch_private.compilation_metrics()
    return (
        ("counters of torch.compile", lambda: _counted(counters), partial(_write_counters, counters)),
        ("metrics of torch.compile", lambda: list(metrics or ()), partial(_rewrite, metrics)),
        ("settings of torch.compile", _read_configs, _write_configs),
        ("stance of torch.compile", torch_private.stance, torch_private.set_stance),
        ("FP8 state of Transformer Engine", lambda: contents(_te_attributes()), _write_te),
    )


def _counted(counters: Any) -> dict[str, dict[str, int]]:
    return {key: dict(value) for key, value in (counters or {}).items()}


def _write_counters(counters: Any, before: dict[str, dict[str, int]]) -> None:
    counters.clear()
    for key, counted in before.items():
        counters[key].update(counted)


def _rewrite(values: Any, before: list[Any]) -> None:
    values.clear()
    values.extend(before)


def _read_configs() -> dict[str, dict[str, Any]]:
    return {
        name: sys.modules[name].get_config_copy() for name in torch_private.CONFIGS if name in sys.modules
    }


def _write_configs(before: dict[str, dict[str, Any]]) -> None:
    for name, values in before.items():
        config: Any = sys.modules[name]
        now = config.get_config_copy()
        for key, value in values.items():
            if now.get(key) != value:
                setattr(config, key, value)


def _te_attributes() -> dict[str, Any]:
    """Collect the plain attributes of Transformer Engine's state."""
    state = te_private.state()
    names = getattr(type(state), "__slots__", None) or list(getattr(state, "__dict__", ()))
    values = {name: getattr(state, name, None) for name in names if not name.startswith("_")}
    kinds = (classmethod, staticmethod)
    return {
        name: value for name, value in values.items() if not callable(value) and not isinstance(value, kinds)
    }


def _write_te(before: Contents) -> None:
    attributes = _te_attributes()
    for name in restore(attributes, before):
        if name in before:
            setattr(te_private.state(), name, attributes[name])
