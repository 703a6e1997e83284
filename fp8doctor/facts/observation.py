"""What was seen of the script's own training steps while ``fp8doctor run`` watched them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from fp8doctor.facts.record import Record
from fp8doctor.facts.unrecorded import NOT_RECORDED


class Observation(Record, frozen=True, kw_only=True):
    """A window of real steps. A step lasts from the end of one optimizer step to the end of the next."""

    steps_ms: tuple[float, ...] = NOT_RECORDED
    """Of every step in the window, in their order."""
    warmup: Annotated[int, Meta(ge=0)] = NOT_RECORDED
    """Steps before the window."""
    clock: Literal["cuda", "host"] = NOT_RECORDED
    """What timed the steps: events of the GPU, or the clock of the host."""
    data_ms: tuple[float, ...] | None = NOT_RECORDED
    """Of every step, how long the training thread waited inside torch's DataLoader; with a GPU only waits at
    whose end the GPU had nothing left to do. None where no batch came from such a loader."""
    before_forward_ms: tuple[float, ...] | None = NOT_RECORDED
    """Of every step, from its beginning to the first call of the model, waiting for data included; None where
    no call was seen."""
    calls: Annotated[int, Meta(ge=0)] | None = NOT_RECORDED
    """Training calls of the model in one step, which are its micro-batches; None where they differ or none
    was seen."""
    compiled: Annotated[int, Meta(ge=0)] = NOT_RECORDED
    """Frames that Dynamo compiled during the window; a step that compiled tells nothing."""
    optimizers: tuple[str, ...] = NOT_RECORDED
    """Qualified classes of all optimizers that stepped, the one that holds most parameters first."""
    share_pct: float = NOT_RECORDED
    """Share of the stepped parameters that the model owns, by their elements."""
