"""torch.compile's state in this process, read only where it is loaded already."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from fp8doctor.facts import Dynamo
from fp8doctor.facts.scrub import scrub
from fp8doctor.stacks import torch_private

AT_MOST = 3
"""Failures that are kept."""


def examine_dynamo(gaps: dict[str, str]) -> Dynamo:
    """Read Dynamo's switches and counters; where it was never imported, its variables say them."""
    config = torch_private.config()
    if config is None:
        return Dynamo(
            disabled=disabled_by_variable(),
            suppress_errors=bool(os.environ.get("TORCHDYNAMO_SUPPRESS_ERRORS")),
            stance="default",
            frames_total=0,
            frames_ok=0,
            failures=(),
        )
    stance = getattr(torch_private.stance(), "stance", None)
    frames, metrics = torch_private.counters("frames"), torch_private.compilation_metrics()
    if stance is None or frames is None or metrics is None:
        gaps["training.dynamo"] = (
            "this torch keeps Dynamo's stance, counters or metrics where 2.6 to 2.15 do not"
        )
    frames = frames or {}
    return Dynamo(
        disabled=bool(config.disable),
        suppress_errors=bool(config.suppress_errors),
        stance=stance or "default",
        frames_total=int(frames.get("total", 0)),
        frames_ok=int(frames.get("ok", 0)),
        failures=failures(metrics or ()),
        recompile_limit=getattr(
            config, "recompile_limit", getattr(config, "cache_size_limit", None)
        ),  # the former from torch 2.7 on
    )


def compiled_nothing() -> bool:
    """Whether Dynamo is on and has not tried to compile a single frame in this process.

    Frames that it loads from a package of compiled code are counted nowhere, so False where it may.
    """
    state = examine_dynamo({})
    config = torch_private.config()
    switched = state.disabled or state.stance != "default" or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    tried = torch_private.frames_tried()
    packaged = getattr(config, "caching_precompile", False)
    return not (switched or tried or packaged or state.frames_total)


def disabled_by_variable() -> bool:
    """Whether ``TORCH_COMPILE_DISABLE`` will switch Dynamo off; before torch 2.8 any value did, even 0."""
    value = os.environ.get("TORCH_COMPILE_DISABLE")
    return value == "1" if torch.__version__ >= "2.8" else bool(value)


def failures(metrics: Iterable[Any]) -> tuple[str, ...]:
    """Type and message of what made compilations fail, scrubbed, each once."""
    failed = [each for each in tuple(metrics) if getattr(each, "fail_type", None)]
    return tuple(
        dict.fromkeys(f"{each.fail_type}: {in_one_line(each.fail_reason or '')}" for each in failed)
    )[:AT_MOST]


def in_one_line(reason: str) -> str:
    """Keep the first two lines of a reason, the backend and what it raised, without secrets."""
    return scrub(" ".join(line.strip() for line in reason.strip().splitlines()[:2]))
