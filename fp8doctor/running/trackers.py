"""Log samples to TensorBoard and Weights & Biases if the script has them open; never open them."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from typing import Any

from fp8doctor.health.record import OPERANDS, Sample

_log = logging.getLogger("fp8doctor")

WRITERS = ("torch.utils.tensorboard.writer", "tensorboardX.writer")
"""Modules of a ``SummaryWriter``."""

_writers: list[weakref.ref[Any]] = []


def log_to_trackers(sample: Sample) -> None:
    """Log the lowest ratio and the largest shares of all layers. Failures are left out."""
    numbers: dict[str, float] = {}
    for operand, casts in zip(OPERANDS, zip(*sample.layers, strict=True), strict=False):
        for name, choose in (("sqnr_db", min), ("saturated_pct", max), ("flushed_pct", max)):
            known = [value for each in casts if each and (value := getattr(each, name)) is not None]
            if known:
                numbers[f"fp8doctor/{operand}_{name}"] = choose(known)
    try:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            run.log(numbers, commit=False)  # it joins the script's next line
        for writer in _open_writers():
            for name, number in numbers.items():
                writer.add_scalar(name, number, sample.step)
    except Exception:
        _log.debug("a sample could not be logged", exc_info=True)


def _open_writers() -> list[Any]:
    """Return TensorBoard's open writers; looked for again only if none is left."""
    found = [getattr(sys.modules.get(name), "SummaryWriter", None) for name in WRITERS]
    if kinds := tuple(kind for kind in found if kind is not None):
        if not any(each() for each in _writers):
            _writers[:] = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, kinds)]
        return [
            each for each in (ref() for ref in _writers) if getattr(each, "file_writer", None) is not None
        ]
    return []
