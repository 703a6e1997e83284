"""The processes that a launcher started for one job, as far as ``fp8doctor run`` heard of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.machine import Gpu
from fp8doctor.facts.observation import Observation
from fp8doctor.facts.record import Prose, Record
from fp8doctor.facts.unrecorded import NOT_RECORDED


class Rank(Record, frozen=True, kw_only=True):
    """One process of the job."""

    rank: Annotated[int, Meta(ge=0)] = NOT_RECORDED
    end: Literal["ended", "raised", "killed", "running", "not_seen"] = NOT_RECORDED
    """``killed`` is every end without Python's own: a signal, a crash, ``os._exit``. ``running`` was still
    there when rank 0 had ended."""
    error: Prose | None = NOT_RECORDED
    """First line of the exception that ended it; None if none did."""
    steps: int | None = NOT_RECORDED
    """Steps that its optimizers took in all; None if it could not say."""
    complete: bool = NOT_RECORDED
    """True if its window was watched to the end."""
    observed: Observation = NOT_RECORDED
    """Its window; not recorded if none was seen."""
    gpu: Gpu | None = NOT_RECORDED
    """The GPU that holds its model, after the window; None if none does."""


class Ranks(Record, frozen=True, kw_only=True):
    """All processes of the job on the host of rank 0."""

    world_size: Annotated[int, Meta(ge=1)] = NOT_RECORDED
    """Processes of the whole job."""
    of_host: int | None = NOT_RECORDED
    """Processes that the launcher started on the host of rank 0; None if it does not say."""
    processes: tuple[Rank, ...] = NOT_RECORDED
    """The host's ranks in order; if the launcher does not give their number, those that reported."""
