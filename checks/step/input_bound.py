"""The step waits for its data

What it finds. The training thread waits in torch's DataLoader, or the GPU waits for copies from the host, for
a share of the step that counts.

Why it matters. A step is as slow as its slowest part. While it waits for a batch no matmul runs, in FP8 as in
BF16, and a faster matmul only makes the wait longer. A comparison of the two then says that FP8 gains
nothing, although the loader is the reason.

Fix. Let worker processes prepare batches ahead, and tokenize, decode and augment before training if possible.
With a GPU, add `pin_memory=True` and copy with `batch.to("cuda", non_blocking=True)`; for many small batches
also `prefetch_factor=4`. Then compare FP8 again.

    loader = DataLoader(dataset, batch_size=16)                                          # before

    from torch.utils.data import DataLoader
    loader = DataLoader(dataset, batch_size=16, num_workers=8, persistent_workers=True)  # after

When to ignore it. If your real data comes from elsewhere, and this loader is only for a test.

How it is detected, and limits. `fp8doctor run` measures the wait inside torch's DataLoader, on a GPU only
while the GPU had nothing to do. In one profiled step, it measures the copies that no other GPU work covered.
It does not see other loaders; the time between two steps is shown next to it.

References. https://docs.pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading
https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

from __future__ import annotations

from fp8doctor.analysis.outcome import watched_job
from fp8doctor.analysis.waiting import Waiting, waiting
from fp8doctor.facts import Facts
from fp8doctor.facts.examples import example
from fp8doctor.finding import Finding, NotApplicable, Saving, Treatment
from fp8doctor.registry import check
from fp8doctor.wording import percent


@check("STP008", "input-bound", area="step", severity="warning")
def input_bound(facts: Facts) -> Finding | NotApplicable | None:
    waits = waiting(facts)
    if waits.waits_for_copies and waits.copies_pct > waits.data_pct:
        return copies(waits, watched_job(facts))
    if waits.data_ms is None:
        return NotApplicable(reason="no batch of the watched steps came from torch's DataLoader")
    if not waits.waits_for_data:
        return None
    return Finding(
        title=f"The step waits {waits.data_ms:,.1f} of {waits.step_ms:,.1f} ms for its data "
        f"({percent(waits.data_pct)})",
        explanation=f"Measured in {len(facts.observed.steps_ms)} steps of {watched_job(facts)}, inside the "
        "DataLoader. A faster matmul only makes this wait longer, and the step no shorter.",
        evidence={
            "data_ms": waits.data_ms,
            "step_ms": waits.step_ms,
            "share_pct": waits.data_pct,
            "before_forward_ms": waits.before_forward_ms,
            "steps": len(facts.observed.steps_ms),
        },
        saving_ms=Saving(low=0.0, high=waits.data_ms, basis="measured"),
        treatment=Treatment(
            name="prepare-data-ahead",
            summary="let worker processes prepare the batches while the model computes",
            code="loader = DataLoader(dataset, batch_size=batch_size, num_workers=8, "
            "persistent_workers=True, pin_memory=True)",
            kind="sketch",
        ),
    )


def copies(waits: Waiting, job: str) -> Finding:
    """Blame the copies of the batch."""
    return Finding(
        title=f"The step waits {waits.copies_ms:,.1f} of {waits.step_ms:,.1f} ms for copies from the host "
        f"to the GPU ({percent(waits.copies_pct)})",
        explanation=f"Measured in one profiled step of {job}: no other GPU work covered them. Copies from "
        "pinned memory can run while the GPU computes.",
        evidence={
            "copies_ms": waits.copies_ms,
            "step_ms": waits.step_ms,
            "share_pct": waits.copies_pct,
            "data_ms": waits.data_ms,
        },
        saving_ms=Saving(low=0.0, high=waits.copies_ms, basis="measured"),
        treatment=Treatment(
            name="copy-beside-the-work",
            summary="copy the next batch from pinned memory while the GPU computes",
            code="loader = DataLoader(dataset, batch_size=batch_size, num_workers=8, pin_memory=True)\n"
            'batch = batch.to("cuda", non_blocking=True)',
            kind="sketch",
        ),
    )


def _watched(waited_ms: float) -> Facts:
    before = (waited_ms + 0.2,) * 3
    return example(steps_ms=(50.0, 52.0, 51.0), data_ms=(waited_ms,) * 3, before_forward_ms=before)


SICK = _watched(waited_ms=20.0)
HEALTHY = _watched(waited_ms=0.3)
