"""What one test could leave behind in the process for all that follow, read without loading anything."""

import copy
import os
import sys
from collections.abc import Callable, Set
from contextvars import ContextVar
from typing import Any

CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
WRITTEN_BY_LIBRARIES = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "CUDA_",
    "PYTORCH_NVML_",
)
"""Prefixes of variables that pytest or torch set for themselves."""

STOOD_IN_FOR = (
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "msamp",
    "peft",
    "pynvml",
    "torchao",
    "transformer_engine",
    "transformer_engine_torch",
    "transformers",
    "trl",
    "unsloth",
)
"""Libraries that a test may put into ``sys.modules`` by hand."""


def process_state() -> dict[str, Any]:
    """Every setting by its name, with its value."""
    return {
        **_variables(),
        **_accelerate(),
        **_torch(),
        **_configs(),
        "sys.path": [each for each in sys.path if not each.endswith("_vendor")],
    }


def stand_ins_since(modules: Set[str]) -> list[str]:
    """Names besides these that no import put into ``sys.modules``: stand-ins, and names barred by None."""
    return [
        name
        for name in sys.modules.keys() - modules
        if name.partition(".")[0] in STOOD_IN_FOR and getattr(sys.modules[name], "__spec__", None) is None
    ]


def _variables() -> dict[str, Any]:
    return {
        f"os.environ[{name!r}]": value
        for name, value in os.environ.items()
        if not name.startswith(WRITTEN_BY_LIBRARIES)
    }


def _accelerate() -> dict[str, Any]:
    module = sys.modules.get("accelerate.state")
    return {
        f"accelerate.state.{kind}": sorted(getattr(getattr(module, kind, None), "_shared_state", ()))
        for kind in ("AcceleratorState", "PartialState", "GradientState")
    }


def _torch() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda = torch.backends.cuda
    read: dict[str, Callable[[], Any]] = {
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "threads": torch.get_num_threads,
        "gradients": torch.is_grad_enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "anomaly detection": torch.is_anomaly_enabled,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "autocast": lambda: torch.is_autocast_enabled("cpu"),
        "flash attention": cuda.flash_sdp_enabled,
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
        "math attention": cuda.math_sdp_enabled,
        "cuDNN attention": cuda.cudnn_sdp_enabled,
        "TF32": lambda: cuda.matmul.allow_tf32,
        "a process group": lambda: torch.distributed.is_available() and torch.distributed.is_initialized(),
        "function modes": lambda: torch._C._len_torch_function_stack(),
        "dispatch modes": lambda: torch._C._len_torch_dispatch_stack(),
    }
    if "torch._dynamo.eval_frame" in sys.modules:
        read["stance"] = lambda: sys.modules["torch._dynamo.eval_frame"]._stance
    return {f"torch: {name}": value() for name, value in read.items()}


def _configs() -> dict[str, Any]:
    return {config: _overrides(sys.modules[config]) for config in CONFIGS if config in sys.modules}


def _overrides(config: Any) -> dict[str, Any]:
    """Name what is set besides the defaults; a copy of all 840 settings takes ten times as long."""
    unset = sys.modules["torch.utils._config_module"]._UNSET_SENTINEL
    entries = config._config
    overrides = [entry.user_override for entry in entries.values()]
    if isinstance(overrides[0], ContextVar):  # one for each context, since torch 2.13
        overrides = [override.get() for override in overrides]
    return {
        name: copy.deepcopy(value)
        for name, value in zip(entries, overrides, strict=True)
        if value is not unset and value != entries[name].default
    }


def of_a_module(name: str) -> bool:
    """Whether this setting exists only once its module is loaded, which is no change."""
    return name.startswith(("torch: ", *CONFIGS))
