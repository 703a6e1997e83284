"""Watch what Dynamo does: graphs, breaks, recompilations, and functions that it leaves eager."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8doctor.facts.scrub import scrub
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import counters, frames_compiled

LIMIT_EXCEEDED = re.compile(r"(recompile|cache)(_size)?[ _]limit (exceeded|reached)", re.IGNORECASE)
"""Dynamo's failure of a frame that was compiled too often: ``Dynamo recompile limit exceeded`` (torch 2.13),
``recompile_limit reached`` (2.9), ``cache_size_limit reached`` (2.6)."""

PLACE = re.compile(r"\S+:\d+ in \S+$")
"""A guard's last comment, its place: ``model.py:12 in forward``."""

MOST_REASONS = 5
"""Most reasons of each kind to keep."""


@dataclass
class Compilations:
    """What Dynamo did while it was watched; not recorded if this torch hides it."""

    graphs: int = NOT_RECORDED
    """The other fields are named as in `ArmCut`."""
    graph_breaks: int = NOT_RECORDED
    break_reasons: tuple[str, ...] = NOT_RECORDED
    recompilations: int = NOT_RECORDED
    recompile_reasons: tuple[str, ...] = NOT_RECORDED
    left_eager: tuple[str, ...] = NOT_RECORDED


@contextmanager
def compilations(model: nn.Module) -> Iterator[Compilations]:
    """Watch Dynamo, and fill the yielded record at the end.

    Functions of ``model`` are named with their class. Dynamo's own list of compilations holds the last 64: a
    longer one replaces it meanwhile.
    """
    torch_private.load_dynamo()
    seen, frames, broken = Compilations(), frames_compiled(), counters("graph_break") or {}
    kept, log = torch_private.compilation_metrics(), deque[Any]()
    if kept is not None:
        torch_private.keep_metrics_in(log)
    try:
        yield seen
    finally:
        if kept is not None:
            torch_private.keep_metrics_in(kept)
        breaks = counters("graph_break")
        if breaks is not None:
            more = {each: count - broken.get(each, 0) for each, count in breaks.items()}
            seen.graphs, seen.graph_breaks = frames_compiled() - frames, sum(more.values())
            seen.break_reasons = _few(_break(reason) for reason, count in more.items() if count)
        if kept is not None and all(hasattr(each, "recompile_reason") for each in log):  # torch 2.6 has none
            again = [each for each in log if each.recompile_reason]
            seen.recompilations = sum(not each.fail_type for each in again)
            seen.recompile_reasons = _few(_guard(each.recompile_reason) for each in again)
        if kept is not None and all(hasattr(each, "compile_id") for each in log):
            seen.left_eager = _left_eager(log, model)


def _few(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(scrub, reasons)))[:MOST_REASONS]


def _break(reason: str) -> str:
    """Name a graph break and explain it, without the hints and the user's source."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    explained = next(
        (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), ""
    )
    return f"{lines[0]}: {explained}" if explained else lines[0] if lines else ""


def _guard(reason: str) -> str:
    """Cut ``0/0: x == 1 # the line # file.py:1 in f`` to the guard and its place."""
    guard, *comments = re.split(r"\s+# ", reason.strip().partition("\n")[0])
    guard = re.sub(r"^\[?\d+/\d+\S*: ", "", guard)
    return f"{guard} ({comments[-1]})" if comments and PLACE.match(comments[-1]) else guard


def _left_eager(log: Iterable[Any], model: nn.Module) -> tuple[str, ...]:
    """Name the functions whose limit was exceeded; a forward of the model with its class."""
    forwards = {
        (code.co_filename, code.co_firstlineno): f"{type(module).__qualname__}.forward"
        for module in model.modules()
        if (code := getattr(type(module).forward, "__code__", None)) is not None
    }
    functions: dict[str, str] = {}
    left = []
    for each in log:
        frame = str(each.compile_id).strip("[]").partition("/")[0]
        if each.co_name:
            functions.setdefault(frame, forwards.get((each.co_filename, each.co_firstlineno), each.co_name))
        if LIMIT_EXCEEDED.search(each.fail_reason or ""):
            left.append(
                functions.get(frame)
                or _guard(getattr(each, "recompile_reason", None) or "").rpartition(" in ")[2].rstrip(")")
                or f"frame {frame}"
            )
    return _few(left)
