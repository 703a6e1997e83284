"""The inspected job: the only record with torch objects; it stays in the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fp8doctor.errors import UserError, require
from fp8doctor.facts import Target, Workload
from fp8doctor.stacks.looking import read
from fp8doctor.stacks.tensors import tensors


@dataclass
class Job:
    """A training job of `fp8doctor.loading.model_file`, a script or `inspect_model`."""

    model: Any
    """The ``torch.nn.Module`` that the user calls, with its wrappers."""
    target: Target
    workload: Workload
    batch: Any = None
    """Mapping (keyword arguments), tuple (positional), or the one argument; for a user's own step, its
    argument."""
    loss: Callable[..., Any] | None = None
    """``loss(output, batch)``."""
    optimizer: Any = None
    """A ``torch.optim.Optimizer`` over this model, or None."""
    other_optimizers: tuple[Any, ...] = ()
    """Other live optimizers, which may hold parameters of this model."""
    training_step: Callable[..., Any] | None = None
    """``training_step(model, batch) -> loss``."""
    autocast: Any = None
    """``torch.dtype`` of the autocast around the step, or None."""
    unseen: str = ""
    """Why no call of a script's model was seen, so its autocast is unknown; else empty."""
    opens_autocast: bool = False
    """A watched step opened one, around the model or within."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context around every forward and loss, inside the autocast, such as ``te.autocast``."""
    trainer: Any = None
    """A transformers Trainer, or None."""
    rebuild: Callable[[int], tuple[Any, Any]] | None = None
    """Builds the model with so many layers, and its optimizer or None; None if the file's function takes no
    ``layers``. Raises `fp8doctor.errors.UserError`."""
    unused_marks: bool = False
    """Training steps ran, and nothing with a mark of torch.compile compiled."""
    in_a_function: bool = False
    """A compiled function of the script computes most gradients of the model, which has no mark itself."""
    sharded: Job | None = None
    """The job in this process, if ``model`` is a plain one that stands for its sharded model."""
    watched: Any = None
    """The `fp8doctor.examine.fp8_conversion.ConversionWatch` of the model file, or None."""


def is_trainer(kind: type) -> bool:
    return any(
        base.__name__ == "Trainer" and str(base.__module__).partition(".")[0] == "transformers"
        for base in kind.__mro__
    )


def is_optimizer(value: Any) -> bool:
    """Tell if this is an optimizer, or a library's wrapper around one."""
    steps = not isinstance(value, type) and callable(getattr(value, "step", None))
    return steps and hasattr(value, "param_groups")


def of_trainer(trainer: Any) -> dict[str, Any]:
    """Return what a transformers Trainer gives to a job: model, and arguments of ``job_of``."""
    arguments = read(trainer, "args")
    precision = read(read(trainer, "accelerator"), "mixed_precision")
    asked = next((each for each in ("bf16", "fp16") if read(arguments, each)), precision)
    return {
        "model": _as_trained(trainer, arguments),
        "optimizer": read(trainer, "optimizer"),
        "autocast": autocast_of(asked),
        "accumulate": positive(read(arguments, "gradient_accumulation_steps")) or 1,
        "size": positive(read(arguments, "per_device_train_batch_size")),
        "sequence": positive(read(arguments, "max_length")),
        "trainer": trainer,
    }


def autocast_of(precision: Any) -> Any:
    """Return the dtype of Accelerate's autocast; ``fp8`` runs in BF16 autocast."""
    import torch

    return {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(str(precision))


def _as_trained(trainer: Any, arguments: Any) -> Any:
    """Return the model that the Trainer calls, compiled if it will compile it."""
    import torch

    model, wrapped = read(trainer, "model"), read(trainer, "model_wrapped")
    if wrapped is not None and wrapped is not model:
        return wrapped
    if model is None or not read(arguments, "torch_compile"):
        return model
    backend = read(arguments, "torch_compile_backend") or "inductor"
    return torch.compile(model, backend=backend, mode=read(arguments, "torch_compile_mode"))


def checked_autocast(value: Any) -> Any:
    """Check the autocast's dtype. Raises `UserError`."""
    import torch

    is_dtype = value is None or isinstance(value, torch.dtype)
    require(is_dtype, "autocast", "a dtype such as torch.bfloat16", value)
    if value not in (None, torch.bfloat16, torch.float16):
        raise UserError(f"autocast is {value}; torch.autocast takes torch.bfloat16 or torch.float16")
    return value


def checked_accumulate(value: Any) -> int:
    """Check the micro-batches per step. Raises `UserError`."""
    require(type(value) is int, "accumulate", "a whole number", value)
    if value < 1:
        raise UserError(f"accumulate has to be 1 or more, not {value}")
    return int(value)


def checked_batch(value: Any, what: str, *, own_step: bool) -> Any:
    """Check a batch; a list is only for the user's own step. Raises `WrongType`."""
    import torch

    moves = not isinstance(value, (type, torch.nn.Module)) and callable(getattr(value, "to", None))
    holds = (own_step or not isinstance(value, list)) and (moves or any(True for _ in tensors(value)))
    kinds = "a mapping (keyword arguments), a tuple (positional arguments) or a tensor"
    require(holds or isinstance(value, (Mapping, tuple, torch.Tensor)), what, kinds, value)
    return value


def positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
