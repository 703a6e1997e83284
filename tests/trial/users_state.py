"""All that belongs to a user and to the process, read to the last bit."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list


def flags() -> list[Any]:
    """Process-wide settings, read one by one."""
    backends = torch.backends
    return [
        torch.get_default_dtype(),
        torch.utils._device.CURRENT_DEVICE,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        backends.cuda.matmul.allow_tf32,
        backends.cuda.matmul.fp32_precision,
        backends.fp32_precision,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cudnn.allow_tf32,
        backends.cudnn.enabled,
        backends.mkldnn.matmul.fp32_precision,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        *(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ),
        torch.is_autocast_cache_enabled(),
        [
            list(value)
            for key, value in vars(torch.nn.modules.module).items()
            if key.startswith("_global_") and isinstance(value, dict)
        ],
        torch._dynamo.eval_frame._stance,
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        {kind: dict(counted) for kind, counted in torch._dynamo.utils.counters.items()},
        len(torch._dynamo.utils._compilation_metrics),
        gc.isenabled(),
        gc.get_threshold(),
        sys.getrecursionlimit(),
        os.getcwd(),
        list(sys.path),
        list(sys.argv),
        dict(os.environ),
        (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        (logging.getLogger().level, list(logging.getLogger().handlers), logging.root.manager.disable),
        list(warnings.filters),
        id(warnings.showwarning),
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(each) if each is None else numpy.asarray(each).tolist() for each in numpy.random.get_state()],
        torch.cuda.is_initialized(),
    ]


def of_tensor(tensor: torch.Tensor | None) -> Any:
    """Identity, version and bytes."""
    if tensor is None:
        return None
    return (
        id(tensor),
        tensor.data_ptr(),
        tensor._version,
        tensor.requires_grad,
        tensor.detach().contiguous().view(torch.uint8).tolist() if tensor.dim() else tensor.item(),
    )


def owned(model: nn.Module, optimizer: Any, batch: Any) -> dict[str, Any]:
    """Everything of the user's, to the last bit."""
    modules, named = list(model.named_modules()), [*model.named_parameters(), *model.named_buffers()]
    tensors = batch.values() if isinstance(batch, dict) else (batch,)
    return {
        "tensors": {name: of_tensor(each) for name, each in named},
        "gradients": {name: of_tensor(each.grad) for name, each in named},
        "tensor hooks": {
            name: (
                list(each._backward_hooks or ()),
                list(each._post_accumulate_grad_hooks or ()),
                dict(vars(each)),
            )
            for name, each in named
        },
        "optimizer": [
            of_tensor(value) if isinstance(value, torch.Tensor) else value
            for state in optimizer.state.values()
            for value in state.values()
        ],
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        "modules": {
            name: (id(each), type(each), each.training, {key: id(value) for key, value in vars(each).items()})
            for name, each in modules
        },
        "containers": {
            name: {key: list(value) for key, value in vars(each).items() if isinstance(value, (dict, list))}
            for name, each in modules
        },
        "batch": [of_tensor(each) for each in tensors],
    }


def processes() -> list[str]:
    return [
        Path(f"/proc/self/task/{thread}/children").read_text() for thread in os.listdir("/proc/self/task")
    ]


def differences(before: Any, after: Any) -> list[Any]:
    if isinstance(before, dict):
        return [key for key in before if before[key] != after.get(key)]
    return [(a, b) for a, b in zip(before, after, strict=True) if a != b]


def entries(function: Any) -> list[Any]:
    return [each.code for each in _debug_get_cache_entry_list(function.__code__)]
