"""A callback for Lightning, as ``lightning`` or as ``pytorch_lightning``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fp8doctor.integrations.watching import Watching

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback
else:
    from pytorch_lightning import Callback


class FP8DoctorCallback(Watching, Callback):  # type: ignore[misc]
    """Pass ``callbacks=[FP8DoctorCallback()]`` to a Trainer; arguments: `Watching`."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._stepping: list[Any] = []
        if stage == "fit":
            self._begin(trainer.is_global_zero, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._converted()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._stepping.append(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        stepping, self._stepping = self._stepping, []
        for optimizer in stepping:
            self._stepped(optimizer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._paused()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(failed=True)
