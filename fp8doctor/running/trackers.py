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
    """Log the worst layer's numbers of a sample. Failures are left out."""
    try:
        numbers = worst(sample)
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            run.log(numbers, commit=False)  # it joins the script's next line
        for writer in _open_writers():
            for name, number in numbers.items():
                writer.add_scalar(name, number, sample.step)
    except Exception:
        _log.debug("a sample could not be logged", exc_info=True)


def worst(sample: Sample) -> dict[str, float]:
    """Return the lowest SQNR and the largest shares of all layers, by tensor."""
    found: dict[str, float] = {}
    for place, operand in enumerate(OPERANDS):
        casts = [layer[place] for layer in sample.layers]
        for name, choose in (("sqnr_db", min), ("saturated_pct", max), ("flushed_pct", max)):
            known = [value for each in casts if each and (value := getattr(each, name)) is not None]
            if known:
                found[f"fp8doctor/{operand}_{name}"] = choose(known)
    return found


def _open_writers() -> list[Any]:
    """Return the TensorBoard writers that are open; looked for once, and again if none is left."""
    kinds = tuple(
        kind
        for name in WRITERS
        if (kind := getattr(sys.modules.get(name), "SummaryWriter", None)) is not None
    )
    if not kinds:
        return []
    found = [writer for each in _writers if (writer := each()) is not None]
    if not found:
        found = [each for each in gc.get_objects() if isinstance(each, kinds)]
        _writers[:] = map(weakref.ref, found)
    return [each for each in found if getattr(each, "file_writer", None) is not None]
