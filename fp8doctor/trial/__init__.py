"""The trial: time variants of the training step on copies of the user's model."""

from fp8doctor.trial.conductor import time_copies
from fp8doctor.trial.layers.fake_forward import with_forward
from fp8doctor.trial.layers.seen_calls import without_forward
from fp8doctor.trial.measure.budget import Budget, DeviceLost

__all__ = ["Budget", "DeviceLost", "time_copies", "with_forward", "without_forward"]
