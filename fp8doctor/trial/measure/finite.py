"""Note if a step's loss and gradients are finite, and keep NaN out of the weights.

All variants share one set of weights: a NaN that one variant's update carries into them would be in every
variant, BF16 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

Step = Callable[[], torch.Tensor]


class WatchedSteps:
    """A step whose loss and gradients are watched; its update sees finite ones only.

    Nothing is read from the device before `non_finite` is called.
    """

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer) -> None:
        self._step, self._optimizer = step, optimizer
        self._losses: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []

    def __call__(self) -> torch.Tensor:
        with _before_the_update(self._optimizer, self._look):
            loss = self._step()
        self._losses.append(loss.isfinite().all())
        return loss

    def _look(self, gradients: list[torch.Tensor]) -> None:
        largest = [torch.linalg.vector_norm(each, torch.inf) for each in gradients]
        self._gradients.append(torch.stack([each.isfinite() for each in largest]).all())
        _clear(gradients)

    def non_finite(self) -> tuple[str, ...] | None:
        """Name what was NaN or infinite, ``loss`` or ``gradients``; None if not seen."""
        if len(self._gradients) < len(self._losses):
            return None
        seen = {"loss": self._losses, "gradients": self._gradients}
        return tuple(name for name, finite in seen.items() if finite and not bool(torch.stack(finite).all()))

    def unwatched(self) -> Step:
        """Return the step itself, with its update still guarded if that was needed."""
        return self._kept_finite if "gradients" in (self.non_finite() or ()) else self._step

    def _kept_finite(self) -> torch.Tensor:
        with _before_the_update(self._optimizer, _clear):
            return self._step()


@contextmanager
def _before_the_update(
    optimizer: torch.optim.Optimizer, act: Callable[[list[torch.Tensor]], None]
) -> Iterator[None]:
    """Pass the gradients to ``act`` when the optimizer begins its step."""

    def hook(*_: Any) -> None:
        found = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        data = [each._values() if each.is_sparse else each for each in found]
        with suppress(RuntimeError, NotImplementedError, TypeError):
            act([each for each in data if each.numel()])

    try:
        handle = optimizer.register_step_pre_hook(hook)
    except AttributeError:  # an optimizer that never called the constructor of torch's
        yield
        return
    try:
        yield
    finally:
        handle.remove()


def _clear(gradients: list[torch.Tensor]) -> None:
    for each in gradients:
        torch.nan_to_num_(each, nan=0.0, posinf=0.0, neginf=0.0)
