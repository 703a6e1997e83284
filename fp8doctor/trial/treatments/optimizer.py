"""fused-optimizer: one kernel for many parameters instead of several for each."""

from __future__ import annotations

from dataclasses import replace

from fp8doctor.analysis.treatment_table import FUSABLE
from fp8doctor.loading.job import Job
from fp8doctor.trial.treatments.registry import NotTried, TreatmentContext
from fp8doctor.trial.variant import Variant


def fused_optimizer(variant: Variant, context: TreatmentContext) -> Variant:
    """Rebuild the user's optimizer with ``fused=True``."""
    if context.job is not None and not could_be_fused(context.job):
        raise NotTried("the optimizer is fused already, or has no fused form")
    return replace(variant, optimizer={**(variant.optimizer or {}), "fused": True, "foreach": None})


def could_be_fused(job: Job) -> bool:
    """Whether the user gave an optimizer that torch can fuse and does not. Without one a fused AdamW is timed
    anyway."""
    optimizer = getattr(job.optimizer, "optimizer", job.optimizer)
    kind = type(optimizer)
    if optimizer is None or kind.__name__ not in FUSABLE or not kind.__module__.startswith("torch.optim"):
        return False
    if not all(each.is_floating_point() for group in optimizer.param_groups for each in group["params"]):
        return False  # complex ones
    return not any(group.get("fused") or group.get("differentiable") for group in optimizer.param_groups)
