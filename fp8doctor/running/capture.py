"""Capture one batch of the script, the gradient at the model's output, and autocasts that are opened.

With that gradient a copy needs no loss function: sum(output * gradient) gives every parameter the same
gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8doctor.loading.synthetic_batch import core
from fp8doctor.running.patches import unnoticed
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.trial.state.settings import open_autocast
from fp8doctor.wording import sentence

LARGEST = 2**30
"""Most bytes to keep of a batch, and of the output's gradients. A choice: they must fit next to a training
that fills its GPU. The BF16 logits of 16 x 1024 tokens with 32,000 words are this large."""


class Capture:
    """Input and output gradients of one call of the model."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = True
    ) -> None:
        """Keep copies of the data with ``keep``, else only shapes."""
        self.module = module
        self._kept = _copy if keep else _outline
        self.batch: Any = None
        self.problem: str | None = None
        """Why there is no batch."""
        self.own_loss = False
        """The output carries the loss."""
        self.around = open_autocast()
        self._gradients: dict[int, torch.Tensor] = {}
        if sum(each.numel() * each.element_size() for each in tensors((args, kwargs))) > LARGEST:
            self.problem = f"the batch is larger than {LARGEST >> 30} GiB"
            return
        try:
            batch = _named(module, args, kwargs) if kwargs and args else kwargs or args
            self.batch = with_tensors(batch, self._kept)
        except Exception as error:  # the memory may be full, and tensors may be of any class
            self.problem = f"the batch could not be kept: {sentence(error)}"

    def returned(self, output: Any) -> None:
        """Take the output's gradients in the backward pass."""
        self.own_loss = carried_loss(output) is not None
        if self.own_loss:
            return
        for position, each in enumerate(tensors(output)):
            if each.requires_grad and each.numel() * each.element_size() <= LARGEST:
                each.register_hook(partial(self._take, position))  # type: ignore[no-untyped-call]

    def _take(self, position: int, gradient: torch.Tensor) -> None:
        with unnoticed():
            self._gradients[position] = self._kept(gradient)

    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """Return a loss that reproduces the captured gradients; None if there are none."""
        gradients = self._gradients
        if self.own_loss or not gradients:
            return None

        def loss(output: Any, batch: Any) -> torch.Tensor:
            parts = [
                (each * gradients[position].to(each.device, each.dtype)).sum()
                for position, each in enumerate(tensors(output))
                if position in gradients
            ]
            return torch.stack([each.float() for each in parts]).sum()

        return loss


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name all arguments of a call. Raises TypeError or ValueError if one has no name."""
    signature = inspect.signature(core(module).forward)
    named = dict(signature.bind(*args, **kwargs).arguments)
    for each in signature.parameters.values():
        if each.name in named and each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            raise ValueError("the model takes an argument that has no name")
        if each.kind is each.VAR_KEYWORD:
            named |= named.pop(each.name, {})
    return named


def carried_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def autocast_around(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the autocast that the model is called under."""
    device = next((each.device.type for each in module.parameters()), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, because the script may overwrite its own."""
    return tensor.detach().clone()


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape and dtype without data."""
    return torch.empty_like(tensor.detach(), device="meta")
