"""Private names of Transformer Engine, one small function for each.

Verified in the sources of 1.0 to 2.20, and on a GPU with 2.20.2. If the library is not loaded or lacks the
name, the answer is None.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fp8doctor.stacks.looking import state_of

if TYPE_CHECKING:
    from torch.nn import Module

VERIFIED = "1.0 to 2.20"

STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")
"""Modules of the process-wide FP8 state: from 2.9, and before."""

BUFFERS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
"""Dicts of lists of tensors in the state, per autocast (1.0 to 2.20)."""

ENTERS = ("autocast_enter", "fp8_autocast_enter")
"""The manager's method that opens an autocast: from 2.9, and before. Its third argument is the recipe, its
first the switch (1.0 to 2.20)."""

DATA = (
    *("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv"),
    *("_transpose", "_columnwise_data", "_columnwise_scale_inv"),
)
"""Attributes of quantized tensors with their data and the transposed copy for matmuls (Float8Tensor,
MXFP8Tensor, Float8BlockwiseQTensor, NVFP4Tensor, 2.0 to 2.20; only some versions can be flattened)."""


def state_manager() -> Any:
    """Return the class that manages FP8 in the process, or None (1.0 to 2.20)."""
    managers = (getattr(sys.modules.get(name), "FP8GlobalStateManager", None) for name in STATES)
    return next((each for each in managers if each is not None), None)


def state() -> Any:
    """Return the FP8 state: the manager up to 2.14, an instance from 2.15; or None."""
    manager = state_manager()
    return getattr(manager, "quantization_state", manager)


def autocast_is_open() -> bool:
    """Tell if a module called now would run in FP8 (1.0 to 2.20)."""
    enabled = getattr(state_manager(), "is_fp8_enabled", None)
    return enabled is not None and bool(enabled())


def open_recipe() -> Any:
    """Return the open autocast's recipe (1.0 to 2.20)."""
    return state_manager().get_fp8_recipe()


def recipe_test() -> Any:
    """Return the function that raises if this GPU cannot run a recipe, or None (1.0 to 2.20)."""
    home = sys.modules.get(getattr(state_manager(), "__module__", ""))
    return getattr(home, "check_recipe_support", None)


def meta(module: Module) -> dict[str, Any] | None:
    """Return a module's record of its scaling, or None (1.0 to 2.20)."""
    found = state_of(module).get("fp8_meta")
    return found if isinstance(found, dict) else None


def meta_of_operation(module: Module) -> dict[str, Any]:
    """Return the record of a ``te.ops`` operation's last FP8 forward (1.9 to 2.20)."""
    return (state_of(module).get("_fp8_metas") or {}).get("forward") or {}


def delayed(module: Module, operand: str) -> tuple[Any, Any] | None:
    """Return scale in use and amax history of a delayed cast, or None (2.0 to 2.20).

    A matmul has three places forward (input, weight, output), and two backward, of which the first is the
    gradient. Of a fused MLP: the first matmul's input and weight, the second's gradient.
    """
    known = meta(module) or {}
    state = known.get("scaling_bwd" if operand == "gradient" else "scaling_fwd")
    scale, history = getattr(state, "scale", None), getattr(state, "amax_history", None)
    if scale is None or history is None:
        return None
    place = 2 * (int(known.get("num_gemms", 1)) - 1) if operand == "gradient" else OPERANDS.index(operand)
    return scale[place], history[:, place]


OPERANDS = ("input", "weight")
"""Order of a matmul's forward scales (2.0 to 2.20)."""
