"""A transformers Trainer of a model file, brought to where its first step begins.

The Trainer converts to FP8, compiles and switches checkpointing on in ``train()`` only. Before, a healthy job
looks like one without FP8. So its own ``train()`` is begun, and stopped where training begins.
"""

from __future__ import annotations

import logging
from typing import Any

from fp8doctor.stacks.looking import read
from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")


class _TrainingBegins(BaseException):
    """Ends ``train()`` before its first step; no error, which the Trainer might handle."""


class _Stop:
    """A callback that is called first, so that no other one begins to log or to write."""

    def on_train_begin(self, *each: Any, **named: Any) -> None:
        raise _TrainingBegins


def prepare(trainer: Any) -> None:
    """Have the Trainer convert, wrap and compile its model as ``train()`` does; it stays as it is where it
    has no data or needs other processes or GPUs.

    For a process of its own: the model and the optimizer are changed as training changes them.
    """
    if read(trainer, "train_dataset") is None or _is_spread(trainer):
        return
    callbacks, stop = trainer.callback_handler.callbacks, _Stop()
    callbacks.insert(0, stop)
    try:
        trainer.train()
    except _TrainingBegins:
        pass
    except Exception as error:
        _log.debug("the Trainer's train() raises", exc_info=True)
        _log.warning("the Trainer is looked at unprepared: its train() raises %s", error_in_words(error))
    finally:
        callbacks.remove(stop)
        trainer.is_in_train = False


def _is_spread(trainer: Any) -> bool:
    """Whether the Trainer would wrap the model for several GPUs or processes."""
    arguments = read(trainer, "args")
    engines = ("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled")
    return (read(arguments, "_n_gpu") or 0) > 1 or any(read(trainer, each) for each in engines)
