"""torch.compile's state in this process: settings, counters, workers, and its entries for the user's code.

Settings that this torch keeps elsewhere are left out.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import compiled_entries


def _read_counters() -> dict[str, dict[str, int]]:
    return {key: dict(value) for key, value in _counters().items()}


def _write_counters(value: dict[str, dict[str, int]]) -> None:
    counters = _counters()
    counters.clear()
    for key, counted in value.items():
        counters[key].update(counted)


def _write_metrics(value: list[Any]) -> None:
    metrics = _metrics()
    metrics.clear()
    metrics.extend(value)


def _counters() -> Any:
    return _known(torch_private.all_counters())


def _metrics() -> Any:
    return _known(torch_private.compilation_metrics())


def _known(found: Any) -> Any:
    """Return what was found. Raises `Unknown` for None: the setting is then left out."""
    if found is None:
        raise torch_private.Unknown("Dynamo is not loaded, or keeps this elsewhere")
    return found


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


SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("counters of torch.compile", _read_counters, _write_counters),
    ("metrics of torch.compile", lambda: list(_metrics()), _write_metrics),
    ("settings of torch.compile", _read_configs, _write_configs),
    ("stance of torch.compile", lambda: _known(torch_private.stance()), torch_private.set_stance),
)
"""Name, how to read and how to write."""


class Entries:
    """Dynamo's compiled entries for the user's code objects, as they are now."""

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._before = [(code, compiled_entries(code)) for code in _codes(model, functions)]

    def put_back(self) -> bool:
        """Forget what was compiled since for code that had nothing compiled; return whether all is as it was.

        Single entries cannot be taken out: beside the user's own a new one stays.
        """
        for code, entries in self._before:
            if entries == [] and compiled_entries(code):
                torch_private.reset_code(code)
        return all(_same(entries, compiled_entries(code)) for code, entries in self._before)


def _same(before: list[types.CodeType] | None, now: list[types.CodeType] | None) -> bool:
    """Whether two lists hold the very same objects; False if torch does not tell."""
    return before is not None and now is not None and set(map(id, before)) == set(map(id, now))


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
    torch_private.forget_cuda_graphs()


def workers() -> set[str]:
    """Name what compiling has started in this process and keeps running."""
    running = set(torch_private.compile_pools())
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return running if getattr(bars, "monitor", None) is None else running | {"tqdm"}


def stop_new_workers(before: set[str]) -> None:
    """End the workers that compiling started since; it starts them again when it needs them."""
    for name in sorted(workers() - before, reverse=True):
        if name == "tqdm":
            bars = sys.modules["tqdm"].tqdm
            bars.monitor.exit()
            bars.monitor = None
        else:
            torch_private.stop_pool(name)
