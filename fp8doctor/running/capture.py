"""One batch of the script's own step, and the gradient that its loss sends back to the model's output.

With that gradient no loss function is needed: the sum of output times gradient has the same gradients in
every parameter.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8doctor.loading.given_batch import core
from fp8doctor.stacks.held_tensors import tensors, with_tensors
from fp8doctor.stacks.torch_private import without_modes
from fp8doctor.trial.state.library_state import open_autocast
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")

LARGEST = 2**30
"""Bytes of a batch, and of the gradients at the output, that are kept. A choice: it has to fit beside a
training that fills its GPU; the logits of 16 x 1024 tokens over 32,000 words in BF16 are as large."""


class Capture:
    """What one call of the model was given and what it gave."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = True
    ) -> None:
        """``keep`` takes copies of the data, for a trial; else shapes are enough."""
        self.module = module
        self._keep = keep
        self.batch: Any = None
        self.problem: str | None = None
        """Why there is no batch."""
        self.own_loss = False
        """Whether the output carries the loss."""
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
        """Keep the batch as far as it is needed."""
        try:
            self.batch = with_tensors(batch, _copy if self._keep else _outline)
        except Exception as error:  # the memory may be full, and tensors may be of any class
            self.problem = f"the batch could not be kept: {sentence(error)}"

    def _name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the positional arguments their names."""
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
        """Take the gradients at the output when the backward pass comes by."""
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

    def move(self, device: torch.device) -> None:
        """Move what was kept."""
        self.batch = with_tensors(self.batch, lambda each: each.to(device))
        self._gradients.update({at: each.to(device) for at, each in self._gradients.items()})

    def loss(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """A loss with the gradients that were seen; None where the output carries the loss or none came."""
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
    """The loss that a model's output carries; None where it carries none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def autocast_around(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the autocast that the model is called under."""
    device = next((each.device.type for each in module.parameters()), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: the script may write into its own afterwards."""
    return tensor.detach().clone()


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and dtype without data."""
    return torch.empty_like(tensor.detach(), device="meta")
