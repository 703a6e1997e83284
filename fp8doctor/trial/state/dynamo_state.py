"""torch.compile's state in this process: settings, counters, workers, and its entries for the user's code.

Private names read here, verified on torch 2.13 (entries and ``reset_code`` on 2.11 too): ``counters``,
``_compilation_metrics``, ``_stance``, ``_debug_get_cache_entry_list``, ``reset_code``, ``AsyncCompile.pool``
and ``process_pool``; on torch 2.11 with a GPU: ``reset_cudagraph_trees``. One that is missing is left out.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from torch import nn

CONFIGS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


def _read_counters() -> dict[str, dict[str, int]]:
    return {key: dict(value) for key, value in _utilities().counters.items()}


def _write_counters(value: dict[str, dict[str, int]]) -> None:
    counters = _utilities().counters
    counters.clear()
    for key, counted in value.items():
        counters[key].update(counted)


def _write_metrics(value: list[Any]) -> None:
    metrics = _utilities()._compilation_metrics
    metrics.clear()
    metrics.extend(value)


def _utilities() -> Any:
    return sys.modules["torch._dynamo.utils"]


def _read_configs() -> dict[str, dict[str, Any]]:
    return {name: sys.modules[name].get_config_copy() for name in CONFIGS if name in sys.modules}


def _write_configs(before: dict[str, dict[str, Any]]) -> None:
    for name, values in before.items():
        config: Any = sys.modules[name]
        now = config.get_config_copy()
        for key, value in values.items():
            if now.get(key) != value:
                setattr(config, key, value)


def _read_stance() -> Any:
    return sys.modules["torch._dynamo.eval_frame"]._stance


def _write_stance(value: Any) -> None:
    sys.modules["torch._dynamo.eval_frame"]._set_stance(value)


SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("counters of torch.compile", _read_counters, _write_counters),
    ("metrics of torch.compile", lambda: list(_utilities()._compilation_metrics), _write_metrics),
    ("settings of torch.compile", _read_configs, _write_configs),
    ("stance of torch.compile", _read_stance, _write_stance),
)
"""Name, how to read and how to write."""


class Entries:
    """Dynamo's compiled entries for the user's code objects, as they are now."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._before = [(code, _compiled(code)) for code in _codes(model, functions)]

    def put_back(self) -> bool:
        """Forget what was compiled since for code that had nothing compiled; return whether all is as it was.

        Single entries cannot be taken out: beside the user's own a new one stays.
        """
        from torch._C._dynamo import eval_frame

        for code, entries in self._before:
            if not entries and _compiled(code):
                eval_frame.reset_code(code)
        return all(set(map(id, entries)) == set(map(id, _compiled(code))) for code, entries in self._before)


def _compiled(code: types.CodeType) -> list[Any]:
    """List the compiled code of every entry that is still valid."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return [entry.code for entry in _debug_get_cache_entry_list(code) if entry.code is not None]


def _codes(model: nn.Module, functions: Iterable[Any]) -> list[types.CodeType]:
    """List the code of every class in the model, of the modules that define them, and of the user's
    functions."""
    classes = {base for module in model.modules() for base in type(module).__mro__ if base is not object}
    places = {
        each.__module__
        for each in (*classes, *functions)
        if isinstance(getattr(each, "__module__", None), str)
    }
    holders = [
        *classes,
        *(sys.modules[name] for name in places if name in sys.modules and not name.startswith("torch.")),
    ]
    values = [*functions, *(value for holder in holders for value in list(vars(holder).values()))]
    found = (code for value in values for code in _nested(getattr(value, "__code__", None)))
    return list({id(code): code for code in found}.values())


def _nested(code: Any) -> Iterator[types.CodeType]:
    if isinstance(code, types.CodeType):
        yield code
        for constant in code.co_consts:
            yield from _nested(constant)


def forget_recorded_kernels() -> None:
    """Give up every CUDA graph of torch.compile in this process, the user's too: what was compiled with one
    stays in memory on a GPU, and its graphs with it (torch 2.11)."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        with suppress(AttributeError):
            trees.reset_cudagraph_trees()


def workers() -> dict[str, Any]:
    """List what compiling has started in this process and keeps running, by name."""
    running = {}
    compiling: Any = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        with suppress(AttributeError):
            running.update(
                {
                    name: True
                    for name in ("pool", "process_pool")
                    if getattr(compiling.AsyncCompile, name).cache_info().currsize
                }
            )
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if getattr(bars, "monitor", None) is not None:
        running["tqdm"] = True
    return running


def stop_new_workers(before: dict[str, Any]) -> None:
    """End the workers that compiling started since; it starts them again when it needs them."""
    new = workers().keys() - before.keys()
    if "process_pool" in new:
        sys.modules["torch._inductor.async_compile"].shutdown_compile_workers()
    if "pool" in new:
        pool = sys.modules["torch._inductor.async_compile"].AsyncCompile.pool
        pool().shutdown(wait=True)
        pool.cache_clear()
    if "tqdm" in new:
        bars = sys.modules["tqdm"].tqdm
        bars.monitor.exit()
        bars.monitor = None
