"""The child process: loads the user's file, examines and times it, and sends each result at once.

It is the only process that runs user code.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Target
from fp8doctor.facts.record import settle
from fp8doctor.loading.job import Job
from fp8doctor.loading.model_file import load
from fp8doctor.loading.target import locate
from fp8doctor.pipes import Channel
from fp8doctor.stages import BUDGET_S, Doing, Stage
from fp8doctor.wording import error_in_words
from fp8doctor.worker import Message, TrialRequest

_log = logging.getLogger("fp8doctor")

Send = Callable[[Message], None]

PR_SET_PDEATHSIG = 1
"""``prctl`` option: the signal that a process gets when its parent dies. Source: linux/prctl.h."""


def serve(request: str) -> None:
    """Examine the request's target in the child, and send each result."""
    asked = json.loads(request)
    _die_with(asked["parent"])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Channel(asked["channel"])

    def send(message: Message) -> None:
        if channel.forked:  # a copy that user code made
            os._exit(0)
        channel.send(message)

    try:
        _examine(send, asked)
        send(Message(done=True))
    except UserError as error:
        send(Message(mistake=(settle(str(error)), settle(error.detail))))
    except BaseException as error:
        _log.debug("the worker failed", exc_info=True)
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        where = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        send(Message(failed=settle(f"fp8doctor failed: {error_in_words(error)} ({where})")))


def _examine(send: Send, asked: dict[str, Any]) -> None:
    send(Message(doing=Doing("reading the environment")))
    from fp8doctor.examine import examine, examine_surroundings

    if asked["target"] is None:
        environment = Target(kind="environment", name="environment", attribute=None)
        send(Message(facts=examine_surroundings(environment)))
    elif asked["config"] is not None:
        from fp8doctor.loading.config_model import config_job

        name = Path(asked["target"]).name
        send(Message(doing=Doing(f"building {name} without weights")))
        job = config_job(asked["config"], name, batch=asked["batch"], seq=asked["seq"])
        send(Message(facts=examine(job)))
    else:
        _examine_file(send, asked)


def _examine_file(send: Send, asked: dict[str, Any]) -> None:
    """Load and examine a model file, then time its model or run it on fake tensors."""
    from fp8doctor.examine import examine, examine_surroundings

    target = locate(asked["target"]).target()
    surroundings = examine_surroundings(target)
    send(Message(facts=surroundings))
    send(Message(doing=Doing(f"loading {target.name}", Stage.LOADING)))
    size = {name: asked[name] for name in ("layers", "batch", "seq")}
    job = load(asked["target"], **size, meta=asked["planned"])
    send(Message(doing=Doing(f"looking at {target.name}", Stage.LOOKING)))
    facts = examine(job)  # the surroundings again: loading may have changed variables and imports
    send(Message(facts=facts))
    from fp8doctor.trial import with_forward

    timed = _timed(send, job, facts, asked) if asked["trial"] is not None else None
    known = timed or with_forward(job, facts)
    send(Message(facts=known))


def _timed(send: Send, job: Job, facts: Facts, asked: dict[str, Any]) -> Facts | None:
    """Add the times of the job and the checks' treatments; None if there is no device for it."""
    from fp8doctor.diagnosis.diagnose import hypotheses
    from fp8doctor.trial import Budget, DeviceLost, time_copies

    request = TrialRequest(**asked["trial"])
    budget = Budget.since(asked["began"], request.budget_s or BUDGET_S, asked["ends"])
    checks = tuple(map(Path, request.checks))

    try:
        return time_copies(
            job,
            facts,
            request.device,
            partial(hypotheses, select=request.select, ignore=request.ignore, checks=checks),
            budget,
            lambda doing, arm: send(Message(doing=doing, until=budget.deadline, arm=arm)),
            keep=lambda known: send(Message(facts=known)),
            skip=asked["skip"],
            own_process=True,
        )
    except DeviceLost as lost:
        send(Message(arm=lost.arm, failed=str(lost)))
        os._exit(1)


def _die_with(parent: int) -> None:
    """End this process with its parent, if the system supports it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
