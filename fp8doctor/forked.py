"""Run work on the user's objects in a forked process, to contain side effects."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from fp8doctor.wording import error_in_words

_log = logging.getLogger("fp8doctor")

CHUNK = 1 << 20
"""Bytes per read from the other process."""

LENGTH = 8
"""Bytes of the length prefix of a message."""

TOLD, RAISED = b"t", b"r"
"""First byte of a message."""


class NothingSent(Exception):
    """The work raised, ended early or took too long."""

    def __init__(self, raised: str | None) -> None:
        super().__init__(raised)
        self.raised = raised
        """The exception as text; None if the work ended early or took too long."""


def sent_by_a_fork(work: Callable[[], bytes], longest_s: float) -> bytes:
    """Return the bytes that ``work`` returns in a forked process within this time.

    Raises `NothingSent`, or `OSError` if the system provides no process or pipe.
    """
    listen, tell = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns about threads
            child = os.fork()
        if not child:
            _tell_and_end(work, tell, longest_s)
    except OSError:
        os.close(listen)
        raise
    finally:
        os.close(tell)
    try:
        told = heard(listen, time.monotonic() + longest_s)
    finally:
        os.close(listen)
        for end in (
            os.killpg,
            os.kill,
        ):  # its children too; it may not lead a group yet
            with suppress(ProcessLookupError, PermissionError):
                end(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # if the user has all children waited for
            os.waitpid(child, 0)
    if told[:1] != TOLD:
        raise NothingSent(told[1:].decode() if told else None)
    return told[1:]


def heard(listen: int, until: float) -> bytes:
    """Read a complete message, or nothing; a child of the work may keep the pipe open."""
    message, ready = bytearray(), select.poll()
    ready.register(listen, select.POLLIN)
    while ready.poll(1e3 * max(0.0, until - time.monotonic())):
        if not (part := os.read(listen, CHUNK)):
            break
        message += part
        if len(message) >= LENGTH and len(message) == LENGTH + int.from_bytes(message[:LENGTH]):
            return bytes(message[LENGTH:])
    return b""


def _tell_and_end(work: Callable[[], bytes], tell: int, longest_s: float) -> None:
    """In the child: send what the work returns or raises. Does not return.

    Its own alarm ends the child if it depends on a lock of another thread and the parent is gone.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2 * longest_s)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            told = TOLD + work()
        except Exception as error:
            _log.debug("work in a forked process raises", exc_info=True)
            told = RAISED + error_in_words(error).encode(errors="backslashreplace")
        left = memoryview(len(told).to_bytes(LENGTH) + told)
        while left:
            left = left[os.write(tell, left) :]
    finally:
        os._exit(0)
