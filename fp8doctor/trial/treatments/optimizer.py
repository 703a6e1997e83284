"""fused-optimizer: one kernel for many parameters instead of several for each."""

from __future__ import annotations

from dataclasses import replace

from fp8doctor.loading.job import Job
from fp8doctor.trial.treatments.registry import Case, NotTried, treatment
from fp8doctor.trial.variant import Variant

FUSABLE = ("Adam", "AdamW", "SGD", "Adagrad")
"""Classes of ``torch.optim`` that take ``fused``. Source: torch 2.6 to 2.13 (SGD and Adagrad on CPU and CUDA
alike)."""


@treatment("fused-optimizer", changes="the optimizer")
def fused_optimizer(variant: Variant, case: Case) -> Variant:
    """The user's optimizer with ``fused=True``."""
    if case.job is not None and not could_be_fused(case.job):
        raise NotTried("the optimizer is fused already, or has no fused form")
    return replace(variant, optimizer={**(variant.optimizer or {}), "fused": True, "foreach": None})


def could_be_fused(job: Job) -> bool:
    """Whether the user gave an optimizer that torch can fuse and does not; without one a fused AdamW is
    timed."""
    optimizer = getattr(job.optimizer, "optimizer", job.optimizer)
    kind = type(optimizer)
    if optimizer is None or kind.__name__ not in FUSABLE or not kind.__module__.startswith("torch.optim"):
        return False
    return not any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
