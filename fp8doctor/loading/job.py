"""The job: what is inspected, live. The only record that holds torch objects; it never leaves the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fp8doctor.facts import Target, Workload
from fp8doctor.stacks.looking import read
from fp8doctor.stacks.tensors import tensors


@dataclass
class Job:
    """One training job as `fp8doctor.loading.model_file` or `inspect_model` found it."""

    model: Any
    """The ``torch.nn.Module`` as the user calls it, wrappers on."""
    target: Target
    workload: Workload
    batch: Any = None
    """Mapping (keyword arguments), tuple (positional), or the one argument; of a user's own step, what it
    takes."""
    loss: Callable[..., Any] | None = None
    """``loss(output, batch)``."""
    optimizer: Any = None
    """A ``torch.optim.Optimizer`` over this very model, if there is one."""
    other_optimizers: tuple[Any, ...] = ()
    """Optimizers that are alive beside it, which may hold other parameters of this model."""
    training_step: Callable[..., Any] | None = None
    """``training_step(model, batch) -> loss``."""
    autocast: Any = None
    """``torch.dtype`` of the autocast the step runs under, or None."""
    unseen: str = ""
    """Why no call of a script's model was seen, so that nobody knows whether it stands in an autocast; empty
    where one was, and where the parts of the step are given."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """A context around every forward and loss, inside the autocast, such as ``te.autocast``."""
    trainer: Any = None
    """A transformers Trainer, or the TrainingArguments of a model file."""
    rebuild: Callable[[int], tuple[Any, Any]] | None = None
    """Builds the model with so many layers, and its optimizer or None, as the model file does. None where its
    function takes no ``layers``. Raises `fp8doctor.errors.UserError`."""
    compiled_elsewhere: tuple[str, ...] = ()
    """Names in the model file, or the script, that hold a compiled wrapper of this model."""
    unused_marks: bool = False
    """Whether training steps ran, and nothing that carries a mark of torch.compile compiled in them."""
    watched: Any = None
    """The `fp8doctor.examine.conversion.Watch` that was on while the model file was loaded, or None."""


@dataclass(frozen=True)
class Plan:
    """What a transformers Trainer, or TrainingArguments alone, say about the step."""

    model: Any = None
    """None with TrainingArguments alone."""
    optimizer: Any = None
    autocast: Any = None
    accumulate: int = 1
    batch_size: int | None = None
    sequence_length: int | None = None


def is_trainer(value: Any) -> bool:
    """Whether this is a transformers Trainer, or derives from it; transformers is not imported."""
    return _derives_from(value, "Trainer")


def is_training_arguments(value: Any) -> bool:
    """Whether these are transformers TrainingArguments, or of a class derived from them (``SFTConfig``)."""
    return _derives_from(value, "TrainingArguments")


def is_optimizer(value: Any) -> bool:
    """Whether this is an optimizer, or a library's wrapper around one."""
    return (
        not isinstance(value, type)
        and hasattr(value, "param_groups")
        and callable(getattr(value, "step", None))
    )


def plan_of(trainer: Any) -> Plan:
    """Read a Trainer or TrainingArguments; nothing of it is called."""
    arguments = trainer if is_training_arguments(trainer) else read(trainer, "args")
    precision = read(read(trainer, "accelerator"), "mixed_precision")
    if read(arguments, "bf16"):
        precision = "bf16"
    elif read(arguments, "fp16"):
        precision = "fp16"
    return Plan(
        model=_as_trained(trainer, arguments),
        optimizer=read(trainer, "optimizer"),
        autocast=autocast_of(precision),
        accumulate=_positive(read(arguments, "gradient_accumulation_steps")) or 1,
        batch_size=_positive(read(arguments, "per_device_train_batch_size")),
        sequence_length=_positive(read(arguments, "max_length")),
    )


def autocast_of(precision: Any) -> Any:
    """The dtype of the autocast in which Accelerate runs a step of this ``mixed_precision``: BF16 for FP8
    too."""
    import torch

    return {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(str(precision))


def _as_trained(trainer: Any, arguments: Any) -> Any:
    """The model as the Trainer calls it, or will: with ``torch_compile`` it compiles it when training
    begins."""
    import torch

    model, wrapped = read(trainer, "model"), read(trainer, "model_wrapped")
    if wrapped is not None and wrapped is not model:
        return wrapped
    if model is None or not read(arguments, "torch_compile"):
        return model
    return torch.compile(
        model,
        backend=read(arguments, "torch_compile_backend") or "inductor",
        mode=read(arguments, "torch_compile_mode"),
    )


def checked_autocast(value: Any) -> Any:
    """Check the dtype of the autocast. Raises TypeError or ValueError but for None and two 16-bit dtypes."""
    import torch

    if value is None or value in (torch.bfloat16, torch.float16):
        return value
    if isinstance(value, torch.dtype):
        raise ValueError(f"autocast is {value}; torch.autocast takes torch.bfloat16 or torch.float16")
    raise TypeError(f"autocast has to be a dtype such as torch.bfloat16, not {type(value).__name__}")


def checked_accumulate(value: Any) -> int:
    """Check the micro-batches per step. Raises TypeError or ValueError but for a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"accumulate has to be a whole number, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"accumulate has to be 1 or more, not {value}")
    return value


def checked_batch(value: Any, what: str, *, own_step: bool) -> Any:
    """Check a batch that was given. Raises TypeError for what no model is called with.

    A list is what a DataLoader makes of pairs: ``own_step``, a training step of the user's, takes it apart,
    and no model is called with it.
    """
    import torch

    if isinstance(value, (Mapping, tuple, torch.Tensor)):
        return value
    moves = not isinstance(value, (type, torch.nn.Module)) and callable(getattr(value, "to", None))
    if (own_step or not isinstance(value, list)) and (moves or any(True for _ in tensors(value))):
        return value
    raise TypeError(
        f"{what} has to be a mapping (keyword arguments), a tuple (positional arguments) or a tensor, "
        f"not {type(value).__name__}"
    )


def _derives_from(value: Any, name: str) -> bool:
    return any(
        base.__name__ == name and str(base.__module__).partition(".")[0] == "transformers"
        for base in type(value).__mro__
    )


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
