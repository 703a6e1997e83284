"""An optional part of a trial, measured after the times: what is known of it, or why nothing is."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import torch

from fp8doctor.facts import Trial, recorded
from fp8doctor.trial.copies.replica import NotReplicable
from fp8doctor.trial.measure.trial_run import still_there
from fp8doctor.trial.treatments import NotTried
from fp8doctor.wording import sentence

_log = logging.getLogger("fp8doctor")


class NotMeasured(Exception):
    """There is nothing to say about the part."""


def with_part(trial: Trial, part: str, device: torch.device, measure: Callable[[], object]) -> Trial:
    """Add what ``measure`` returns to the trial as the fact ``part``, or the reason why there is none.

    Raises `DeviceLost` where it took the GPU's context down, and nothing else.
    """
    try:
        return msgspec.structs.replace(trial, **{part: measure()})
    except (NotMeasured, NotTried, NotReplicable) as error:
        reason = str(error)
    except torch.OutOfMemoryError:
        reason = "the GPU's memory is too small for it"
    except Exception as error:
        _log.debug("measuring the %s raises", part, exc_info=True)
        reason = f"it raises {sentence(error)}"
    still_there(device, part)
    gaps = dict(trial.gaps) if recorded(trial, "gaps") else {}
    return msgspec.structs.replace(trial, gaps=gaps | {f"trial.{part}": reason})
