"""How the tests of callbacks watch a training, and what of ours could be left in it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fp8doctor.stacks.torch_private import COMPILED_CALL

STEPS, WARMUP = 3, 2
PROFILED = WARMUP + STEPS + 2
"""Steps until the one after the window is profiled, which the one before it prepares."""


def left_behind(model: nn.Module) -> list[str]:
    """Name everything of ours that could be in the way of a training."""
    left = [name for name, each in model.named_modules() if COMPILED_CALL in vars(each)]
    left += ["the data loader"] * hasattr(_BaseDataLoaderIter.__next__, "__wrapped__")
    left += ["steps"] * len(torch_optimizer._global_optimizer_post_hooks)
    left += ["registrations"] * len(torch_module._global_module_registration_hooks)
    return left
