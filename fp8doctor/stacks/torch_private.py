"""Private names of torch, FSDP and DTensor among them, one small function for each.

A missing name answers None, and what depends on it becomes unknown. Docstrings end with the verified versions
of torch. Functions import torch; the module does not.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from fp8doctor.stacks.looking import ancestor, children_of, held_by, lineage, read

if TYPE_CHECKING:
    from torch.nn import Module

OPTIMIZED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")
"""Class of ``torch.compile(module)`` (2.6 to 2.15)."""

DYNAMO = "torch._dynamo."
"""Prefix of Dynamo's modules (2.6 to 2.15)."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that ``module.compile()`` sets (2.6 to 2.15)."""


class Unknown(Exception):
    """A private name is missing, or works differently than in the verified versions."""


def _loaded(module: str, *names: str) -> Any:
    """Read a name of a loaded module, or None."""
    found: Any = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return found


def _call(module: str, name: str, *arguments: Any) -> None:
    """Call a function of a loaded module, if it is there."""
    if function := _loaded(module, *name.split(".")):
        function(*arguments)


# What torch.compile leaves on modules and functions


def behind_compile(thing: Any) -> Module | None:
    """Return the module that ``torch.compile`` wrapped, or None (2.6 to 2.15)."""
    if ancestor(type(thing), DYNAMO, OPTIMIZED_MODULE[1:]) is None:
        return None
    return children_of(thing).get("_orig_mod")


original = partial(read, name="_torchdynamo_orig_callable")
"""Return the function that ``torch.compile`` compiled, or None (2.6 to 2.15)."""


def disabled(function: Any) -> bool:
    """Tell if ``torch.compiler.disable`` made this function (2.6 to 2.15)."""
    return bool(read(function, "_torchdynamo_disable"))


def disabled_below(function: Any) -> bool:
    """Tell if a disabled function also disables its callees (2.6 to 2.15)."""
    return read(function, "_torchdynamo_disable_recursive", True) is not False


def inner_backend(backend: Any) -> Any:
    """Return the backend inside a backend, or None (2.6 to 2.15)."""
    return read(backend, "_torchdynamo_orig_backend") or original(backend)


def context_of(compiled: Any) -> Callable[[Any], Any] | None:
    """Return a function that compiles others with this one's settings.

    Takes an ``OptimizedModule`` or a compiled function, whose closure has it as ``self``; None for others
    (2.6 to 2.13).
    """
    context = getattr(compiled, "dynamo_ctx", None)
    if context is None and original(compiled) is not None:
        context = held_by(compiled, "self")
    return context if callable(context) else None


def settings_of(context: Any) -> tuple[Any, Any]:
    """Return options and dynamic shapes of a `context_of` (2.11 and 2.13)."""
    return getattr(context, "compiler_config", None), getattr(context, "_dynamic", None)


def is_dynamos_frame(function: Any) -> bool:
    """Tell if this is Dynamo's frame around a skipped function (2.6 to 2.15)."""
    return str(function.__globals__["__name__"]) == "torch._dynamo.external_utils"


def compiled_call(module: Any) -> Any:
    """Return the compiled call of ``module.compile()``, or None (2.6 to 2.15)."""
    return getattr(module, COMPILED_CALL, None)


def compile_call(module: Any, context: Callable[[Any], Any] | None) -> None:
    """Compile a module's call as ``module.compile()`` does; without a context, undo it (2.6 to 2.15)."""
    setattr(module, COMPILED_CALL, context and context(module._call_impl))


def plain_call(module: Any) -> Callable[..., Any]:
    """Return a module's call with its hooks, not compiled (2.6 to 2.15)."""
    call: Callable[..., Any] = module._call_impl
    return call


def _code_of(name: str) -> CodeType | None:
    from torch.nn import Module

    code = read(getattr(Module, name, None), "__code__")
    return code if isinstance(code, CodeType) else None


call_code = partial(_code_of, "_call_impl")
"""Return the code of a module's call with its hooks (2.6 to 2.15)."""

outer_call_code = partial(_code_of, "_wrapped_call_impl")
"""Return the code of ``Module.__call__`` (2.6 to 2.14)."""


# Dynamo's state


def load_dynamo() -> None:
    """Load the modules whose state is read here (2.6 to 2.15)."""
    for name in ("torch._dynamo.eval_frame", "torch._dynamo.utils"):
        importlib.import_module(name)


all_counters = partial(_loaded, "torch._dynamo.utils", "counters")
"""Return Dynamo's counters themselves, a dict of dicts, or None (2.6 to 2.15)."""


def counters(group: str) -> dict[str, int] | None:
    """Copy a group of Dynamo's counters; empty without Dynamo (2.6 to 2.15)."""
    found = all_counters()
    if found is None:
        return None if "torch._dynamo.utils" in sys.modules else {}
    return dict(found.get(group, {}))  # not found[group], which would create it


def frames_compiled() -> int:
    """Count the frames that Dynamo compiled in this process, or 0 (2.6 to 2.15)."""
    return (counters("frames") or {}).get("ok", 0)


compilation_metrics = partial(_loaded, "torch._dynamo.utils", "_compilation_metrics")
"""Return Dynamo's list of its last 64 compilations, or None (2.6 to 2.15)."""


def keep_metrics_in(log: Any) -> None:
    """Have Dynamo append its compilations to another list (2.11 and 2.13)."""
    sys.modules["torch._dynamo.utils"]._compilation_metrics = log  # type: ignore[attr-defined]


stance = partial(_loaded, "torch._dynamo.eval_frame", "_stance")
"""Return the stance of ``torch.compiler.set_stance``, or None (2.6 to 2.15)."""


config = partial(_loaded, "torch._dynamo.config")
"""Return Dynamo's loaded settings, or None (2.6 to 2.15)."""

frames_tried = partial(_loaded, "torch._dynamo.convert_frame", "FRAME_COUNTER")
"""Return how many frames Dynamo has tried to compile in this process, or None (2.6 to 2.15)."""


def never_traced(function: Any) -> Any:
    """Have a graph end at each call, without importing Dynamo, as ``disable`` does (2.11 and 2.13)."""
    import torch

    lazily: Any = _loaded("torch._compile", "_disable_dynamo") or torch.compiler.disable
    return lazily(function)


def is_traced() -> bool:
    """Tell if Dynamo would trace this thread's next call (2.6 to 2.13)."""
    callback = _loaded("torch._C", "_dynamo", "eval_frame", "get_eval_frame_callback")
    return callback is not None and callback() is not None


tracing_callbacks = partial(_loaded, "torch._dynamo.callback", "callback_handler")
"""Return Dynamo's callbacks for begin and end of tracing, or None (2.6 to 2.13)."""

skip = partial(_call, "torch._dynamo.eval_frame", "skip_code")
"""Have Dynamo never compile a code object (2.6 to 2.13)."""


def seen_codes() -> list[CodeType]:
    """List the code objects that Dynamo has met (2.11 and 2.13)."""
    seen = _loaded("torch._dynamo.convert_frame", "input_codes", "seen") or ()
    return [code for each in list(seen) if (code := each()) is not None]


def compiled_entries(code: CodeType) -> list[CodeType]:
    """List the code of every valid entry for a code object (2.11 and 2.13)."""
    entries = _loaded("torch._C", "_dynamo", "eval_frame", "_debug_get_cache_entry_list")
    return [] if entries is None else [each.code for each in entries(code) if each.code is not None]


reset_code = partial(_call, "torch._C", "_dynamo.eval_frame.reset_code")
"""Forget the entries of a code object (2.11 and 2.13)."""


# Inductor


may_hold_cuda_graphs = partial(_loaded, "torch._inductor.cudagraph_trees")
"""Return a module if Inductor may have captured CUDA graphs, else None (2.6 to 2.14)."""

forget_cuda_graphs = partial(_call, "torch._inductor.cudagraph_trees", "reset_cudagraph_trees")
"""Free every CUDA graph of Inductor in this process (2.11)."""


def compile_pools() -> list[str]:
    """Name Inductor's started worker pools (2.13)."""
    found = ((name, _pool(name)) for name in ("pool", "process_pool"))
    return [name for name, pool in found if pool is not None and pool.cache_info().currsize]


def stop_pool(name: str) -> None:
    """Stop one of these, which torch restarts at need (2.13)."""
    if name == "process_pool":
        _loaded("torch._inductor.async_compile").shutdown_compile_workers()
    else:
        pool = _pool(name)
        pool().shutdown(wait=True)
        pool.cache_clear()


def _pool(name: str) -> Any:
    pool = _loaded("torch._inductor.async_compile", "AsyncCompile", name)
    return pool if hasattr(pool, "cache_info") else None


# Autograd, the profiler, the GPU


def in_backward() -> bool | None:
    """Tell if this runs inside a backward, recomputed by checkpointing (2.6 to 2.13)."""
    task = _loaded("torch._C", "_current_graph_task_id")
    return None if task is None else bool(task() >= 0)


def is_profiled() -> bool:
    """Tell if a profiler is active (2.11 and 2.13); False if unknown."""
    here = _loaded("torch._C._autograd", "_profiler_enabled")
    return bool(_loaded("torch.autograd.profiler", "_is_profiler_enabled") or (here and here()))


PREPARES_PROFILER, STARTS_PROFILER = "_prepare_trace", "_start_trace"
"""Methods that prepare a profiler, and start a prepared one (2.6 to 2.14)."""

clear_cublas_workspaces = partial(_call, "torch._C", "_cuda_clearCublasWorkspaces")
"""Free cuBLAS's workspaces, 66 MiB on an H200 (2.6 to 2.13)."""

default_device = partial(_loaded, "torch.utils._device", "CURRENT_DEVICE")
"""Return the device of ``torch.set_default_device``; None if not loaded: nothing set one (2.6 to 2.13)."""


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable dispatch modes, which would see our work (2.6 to 2.15)."""
    without = _loaded("torch.utils._python_dispatch", "_disable_current_modes") or nullcontext
    with without():
        yield


def fake_tensor_mode(**settings: Any) -> Any:
    """Return a mode whose tensors have shapes but no data (2.6 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(**settings)


def storage_of(tensor: Any) -> int:
    """Return what a tensor's views share with it, also without data (2.6 to 2.15)."""
    storage: Any = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", 0) or storage.data_ptr())


FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"
"""Class of tensors without data (2.6 to 2.15)."""

loader_iterator = partial(_loaded, "torch.utils.data.dataloader", "_BaseDataLoaderIter")
"""Return the class of a DataLoader's iterators, or None (2.6 to 2.15)."""


# Wrappers of torch.distributed

CHECKPOINT_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""Module of ``CheckpointWrapper`` and ``OffloadWrapper`` (2.6 to 2.15)."""

COMPILED_CHILD, CHECKPOINTED_CHILD, FSDP1_CHILD = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
)
"""Children of ``OptimizedModule``, ``CheckpointWrapper`` and ``FullyShardedDataParallel`` (2.6 to 2.15)."""

WRAPPERS = {
    OPTIMIZED_MODULE: COMPILED_CHILD,
    (CHECKPOINT_WRAPPERS, "CheckpointWrapper"): CHECKPOINTED_CHILD,
    (CHECKPOINT_WRAPPERS, "OffloadWrapper"): CHECKPOINTED_CHILD,
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): FSDP1_CHILD,
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
}
"""Wrapper class -> the wrapped child, which takes the wrapper's name (2.6 to 2.15)."""


def wrapped_child(module: Module) -> Module | None:
    """Return the module inside a wrapper; None for a module that is no wrapper."""
    known = next((each for each in lineage(type(module)) if each in WRAPPERS), None)
    return None if known is None else children_of(module).get(WRAPPERS[known])


FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable")
"""Homes of ``FSDPModule`` (2.6 to 2.15)."""


def fsdp2_policy(module: Any) -> Any:
    """Return FSDP2's mixed-precision policy of a module, or None (2.6 to 2.13)."""
    home = sys.modules.get("torch.distributed._composable_state")
    state_of = getattr(home, "_get_module_state", None)
    return read(state_of(module), "_mp_policy") if state_of else None


local_tensor = partial(read, name="_local_tensor")
"""Return this process's part of a DTensor, or None (2.6 to 2.15)."""


def without_fsdps(state: dict[str, Any]) -> dict[str, Any]:
    """Remove FSDP's hooks, states and marks from a copy of a module's attributes (2.6 to 2.13).

    By two of them Dynamo knows modules of FSDP; one begins the names of the states of ``fully_shard``.
    """
    for key in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        state.pop(key, None)
    composable = "__composable_api_state_key"
    for key, value in state.items():
        if isinstance(value, dict) and (key.endswith("_hooks") or key.startswith(composable)):
            state[key] = type(value)((name, each) for name, each in value.items() if not is_fsdps(each))
    return state


def is_fsdps(value: Any) -> bool:
    home = getattr(value, "__module__", None) or type(value).__module__
    return home.startswith("torch.distributed.fsdp")


def fsdp1_parameters(wrapper: Any) -> list[tuple[Any, tuple[int, ...], int]] | None:
    """Return each parameter of one ``FullyShardedDataParallel``, its whole shape, and its share in elements.

    None if it does not keep the original parameters, as with ``use_orig_params=False`` (2.6 to 2.13).
    """
    handle = read(wrapper, "_handle")
    if handle is None:  # it holds none of its own
        return []
    flat = read(handle, "flat_param")
    parameters, shapes, size = (read(flat, name) for name in ("_params", "_shapes", "_sharded_size"))
    if parameters is None or shapes is None or size is None:
        return None
    part = size.numel() / max(1, sum(shape.numel() for shape in shapes))
    return [
        (each, tuple(shape), math.ceil(part * shape.numel()))
        for each, shape in zip(parameters, shapes, strict=True)
    ]
