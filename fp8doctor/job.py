"""The job: what is inspected, live. The only record that holds torch objects; it never leaves the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8doctor.facts import Target, Workload


@dataclass
class Job:
    """One training job as `fp8doctor.load` or `inspect_model` found it."""

    model: Any
    """The ``torch.nn.Module`` as the user calls it, wrappers on."""
    target: Target
    workload: Workload
    batch: Any = None
    """Mapping (keyword arguments), tuple (positional) or tensor."""
    loss: Callable[..., Any] | None = None
    """``loss(output, batch)``."""
    optimizer: Any = None
    """A ``torch.optim.Optimizer`` over this very model, if there is one."""
    training_step: Callable[..., Any] | None = None
    """``training_step(model, batch) -> loss``."""
    autocast: Any = None
    """``torch.dtype`` of the autocast the step runs under, or None."""
    trainer: Any = None
    """A transformers Trainer, or the TrainingArguments of a model file."""
    compiled_elsewhere: tuple[str, ...] = ()
    """Names in the model file that hold a compiled wrapper of this model."""
