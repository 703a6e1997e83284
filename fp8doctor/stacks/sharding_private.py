"""Private names of FSDP and DTensor, one small function for each; as in `fp8doctor.stacks.torch_private`."""

import math
import sys
from functools import partial
from typing import Any

from fp8doctor.stacks.looking import read

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
