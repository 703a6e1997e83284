"""Leave the process, the user's model and the GPU's memory as they were, and report what a trial changed."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import torch

from fp8doctor.examine.torch_state import not_the_users
from fp8doctor.facts import Trial, recorded
from fp8doctor.facts.trial import GREW
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.stacks.torch_private import compiled_entries
from fp8doctor.trial.state import settings
from fp8doctor.trial.state.te_state import buffers_apart
from fp8doctor.trial.state.users import UserObjects


class ProcessSnapshot:
    """Put back everything that replicas may change, also after an interrupt.

    The process's settings (random numbers, flags, variables) are put back silently, because a user's own
    forward may change them. Changes of the user's model are put back, then named in the list that the context
    gives; so is what cannot be put back. Inside, gradients are on and warnings are hidden.

    Enter it twice, ``with kept, kept``: an interrupt may come just when the first begins to put back, and
    then the second does it.
    """

    def __init__(self, job: Job) -> None:
        torch_private.load_dynamo()  # whose settings are read
        self._named: list[str] = []
        self._settings = settings.read()
        self._handlers = self._settings.pop(settings.HANDLERS, {})
        self._pools = {*torch_private.compile_pools()}
        self._monitor, self._allocated = _monitor_of_bars(), _allocated()
        self._objects = UserObjects(job)
        self._entries = Entries()
        self._around = ExitStack()
        self._entered = self._left = False

    def __enter__(self) -> list[str]:
        try:
            with signals_deferred():
                if not self._entered:
                    self._entered = True
                    self._around.enter_context(not_the_users())
                    self._around.enter_context(buffers_apart())
                    self._around.enter_context(warnings.catch_warnings())
                    self._around.enter_context(torch.inference_mode(False))
                    self._around.enter_context(torch.enable_grad())
                    warnings.simplefilter("ignore")
            return self._named
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:  # an interrupt may have come before signals were deferred
            self._leave()

    def _leave(self) -> None:
        settings.write_handlers(self._handlers)
        with signals_deferred():
            if not self._left:
                self._put_back()
                self._left = True

    def _put_back(self) -> None:
        """Put everything back, also if one part fails; its exception is raised at the end."""
        with ExitStack() as last_first:
            last_first.callback(self._look)
            last_first.callback(self._forget_compiled)
            for pool in sorted({*torch_private.compile_pools()} - self._pools):
                last_first.callback(torch_private.stop_pool, pool)
            if self._monitor is None:
                last_first.callback(_stop_monitor_of_bars)
            last_first.callback(settings.put_back, self._settings)
            last_first.callback(self._put_users_objects_back)
            last_first.callback(self._around.close)

    def _put_users_objects_back(self) -> None:
        self._named += [f"{name} (put back)" for name in self._objects.put_back()]

    def _forget_compiled(self) -> None:
        if not self._entries.put_back():
            self._named.append("compiled code of the model")
        if any(self._settings.get(f"autocast: {device}") is True for device in ("cpu", "cuda")):
            torch.clear_autocast_cache()

    def _look(self) -> None:
        self._named += settings.differing(self._settings, settings.read())
        if _allocated() - self._allocated > MEMORY_SLACK:
            self._named.append(MEMORY)


def free(device: torch.device) -> None:
    """Give memory back, and cuBLAS's workspaces (66 MiB on an H200) if torch can free them."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch_private.clear_cublas_workspaces()
            torch.cuda.empty_cache()


MEMORY = "memory of the GPU"

CONTEXT = "the GPU's context in this process, which is unusable now"

MEMORY_SLACK = 64 * 2**20
"""Bytes of GPU memory that may be held in addition: cuBLAS workspaces and small constants. A choice."""


def _allocated() -> int:
    """Count the bytes that torch holds on all GPUs; 0 if CUDA is not in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


def with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """Add changes outside the replicas to the trial; they make its times doubtful too."""
    known = trial.harm if recorded(trial, "harm") else ()
    new = tuple(name for name in dict.fromkeys(changed) if name not in known)
    if not new:
        return msgspec.structs.replace(trial, harm=known)
    own = [name for name in new if name != MEMORY]  # which another thread may take, and costs no time
    reasons = [trial.reason] if trial.reason else []
    if own:
        reasons.append(f"it changed what it had to leave alone: {', '.join(own)}")
    if MEMORY in new:
        reasons.append(f"{GREW}{MEMORY}")
    return msgspec.structs.replace(
        trial, harm=(*known, *new), reason="; ".join(reasons), reliable=trial.reliable and not own
    )


class Entries:
    """Dynamo's compiled entries for all code objects in this process, read when this is made."""

    def __init__(self) -> None:
        self._before = [(code, compiled_entries(code)) for code in torch_private.seen_codes()]

    def put_back(self) -> bool:
        """Forget entries of code that had none; return whether all is as it was.

        Single entries cannot be removed: a new one next to the user's own stays.
        """
        had = {id(code) for code, entries in self._before if entries}
        for code in torch_private.seen_codes():
            if id(code) not in had and compiled_entries(code):
                torch_private.reset_code(code)
        return all({*map(id, before)} == {*map(id, compiled_entries(code))} for code, before in self._before)


def _monitor_of_bars() -> Any:
    """Return the thread that tqdm keeps running once torch.compile has shown a bar, if there is one."""
    return getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "monitor", None)


def _stop_monitor_of_bars() -> None:
    """End that thread; tqdm starts it again if it needs it."""
    if (monitor := _monitor_of_bars()) is not None:
        monitor.exit()
        sys.modules["tqdm"].tqdm.monitor = None
