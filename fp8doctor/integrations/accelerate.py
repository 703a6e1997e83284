"""Check a model before the expensive run, for training loops on Accelerate."""

from typing import Any

from fp8doctor.api import inspect_model
from fp8doctor.integrations.watching import FailOn, check_fail_on
from fp8doctor.loading.job import autocast_of
from fp8doctor.report import Report


def check(
    accelerator: Any,
    model: Any,
    optimizer: Any = None,
    batch: Any = None,
    *,
    fail_on: FailOn = "error",
    require_fp8: bool = False,
    **options: Any,
) -> Report | None:
    """Examine what ``accelerator.prepare`` returned, and raise `ReportFailed`.

    It raises for a finding at or above ``fail_on``. ``require_fp8`` is that of `Report.raise_for`.
    Precision and micro-batches come from the accelerator; ``options`` are those of `inspect_model`. Only the
    main process checks; the others get None.
    """
    check_fail_on(fail_on)
    if not accelerator.is_main_process:
        return None
    options.setdefault("autocast", autocast_of(accelerator.mixed_precision))
    options.setdefault("accumulate", accelerator.gradient_accumulation_steps)
    report = inspect_model(model, batch, optimizer=optimizer, **options)
    report.raise_for(fail_on, require_fp8=require_fp8)
    return report
