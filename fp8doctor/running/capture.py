"""Capture one batch of the script, the gradient at the model's output, and autocasts that are opened.

With that gradient a copy needs no loss function: sum(output * gradient) gives every parameter the same
gradient.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8doctor.loading.synthetic_batch import core
from fp8doctor.stacks.tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import without_modes
from fp8doctor.trial.state.te_state import open_autocast
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

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
        self._keep = keep
        self.batch: Any = None
        self.problem: str | None = None
        """Why there is no batch."""
        self.own_loss = False
        """The output carries the loss."""
        self.around = open_autocast()
        self._gradients: dict[int, torch.Tensor] = {}
        given = (*args, *kwargs.values())
        if sum(each.numel() * each.element_size() for each in tensors(given)) > LARGEST:
            self.problem = f"the batch is larger than {LARGEST >> 30} GiB"
        elif kwargs and args:
            self._name(args, kwargs)
        else:
            self._take(kwargs or args)

    def _take(self, batch: Any) -> None:
        try:
            self.batch = with_tensors(batch, _copy if self._keep else _outline)
        except Exception as error:  # the memory may be full, and tensors may be of any class
            self.problem = f"the batch could not be kept: {sentence(error)}"

    def _name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(core(self.module).forward)
            named = signature.bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            self.problem = f"the arguments of the model could not be named: {error}"
            return
        kinds = {signature.parameters[name].kind for name in named.arguments}
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
            self.problem = "the model takes positional and named arguments that cannot all be named"
            return
        whole = dict(named.arguments)
        for name in [
            each for each in whole if signature.parameters[each].kind is inspect.Parameter.VAR_KEYWORD
        ]:
            whole |= whole.pop(name)
        self._take(whole)

    def returned(self, output: Any) -> None:
        """Take the output's gradients in the backward pass."""
        self.own_loss = carried_loss(output) is not None
        if self.own_loss:
            return
        for position, each in enumerate(tensors(output)):
            if each.requires_grad and each.numel() * each.element_size() <= LARGEST:
                each.register_hook(self._taker(position))  # type: ignore[no-untyped-call]

    def _taker(self, position: int) -> Callable[[torch.Tensor], None]:
        def take(gradient: torch.Tensor) -> None:
            with without_modes():
                try:
                    self._gradients[position] = (_copy if self._keep else _outline)(gradient)
                except Exception:
                    _log.debug("a gradient could not be kept", exc_info=True)

        return take

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
