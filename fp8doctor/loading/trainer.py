"""Prepare a model file's transformers Trainer, and read a batch of its data."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from fp8doctor.stacks.looking import read, read_class
from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")


class NoBatchError(Exception):
    """No batch can be made; the message says why."""


class _TrainingBegins(BaseException):
    """Ends ``train()`` before its first step; no Exception, which it might catch."""


class _Stop:
    """The first callback, so no other begins to log or write."""

    def on_train_begin(self, *each: Any, **named: Any) -> None:
        raise _TrainingBegins


def prepare(trainer: Any) -> None:
    """Have the Trainer convert, wrap and compile its model as ``train()`` does.

    Without data, or with several processes or GPUs, it stays as it is. For a process of its own: model and
    optimizer change.
    """
    engines = ("is_deepspeed_enabled", "is_fsdp_enabled", "is_fsdp_xla_enabled")
    spread = (read(read(trainer, "args"), "_n_gpu") or 0) > 1 or any(read(trainer, each) for each in engines)
    if spread or read(trainer, "train_dataset") is None:
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


def own_batch(trainer: Any, model: Any) -> Any:
    """Read a batch that the Trainer would train with. Raises `NoBatchError`.

    For a process of its own: data and random states advance. Nothing is prepared, which uses GPU or ranks.
    """
    from torch.utils.data import DataLoader

    accelerator = read(trainer, "accelerator")
    kept = {} if accelerator is None else vars(accelerator)
    kept.update(prepare=_as_they_are, prepare_data_loader=_as_they_are)
    try:
        loader = trainer.get_train_dataloader()
        if isinstance(loader, DataLoader):
            vars(loader).update(num_workers=0, timeout=0, pin_memory=False)
        return _accepted(next(iter(loader)), model)
    except Exception as error:
        raise NoBatchError(error_in_words(error)) from error
    finally:
        del kept["prepare"], kept["prepare_data_loader"]


def _as_they_are(*each: Any, **options: Any) -> Any:
    return each[0] if len(each) == 1 else each


def _accepted(batch: Any, model: Any) -> Any:
    """Drop what the model does not take: it is for the Trainer's own loss."""
    if not isinstance(batch, Mapping):
        return tuple(batch) if isinstance(batch, list) else batch
    try:
        takes = inspect.signature(read_class(type(model), "forward")).parameters.values()
    except (TypeError, ValueError):
        return batch
    if any(each.kind is each.VAR_KEYWORD for each in takes):
        return batch
    return {name: value for name, value in batch.items() if name in {each.name for each in takes}}
