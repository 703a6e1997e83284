"""What a trial leaves as it was, whether it returns or raises: the process's settings, the user's model, the
memory of the GPU.

`fp8doctor.trial.state.digest` then says what could not be left so.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack, suppress

import torch

from fp8doctor.examine.allocator import not_the_users
from fp8doctor.loading.job import Job
from fp8doctor.signals import signals_deferred
from fp8doctor.stacks import torch_private
from fp8doctor.trial.state import dynamo_state, settings
from fp8doctor.trial.state.belongings import Belongings
from fp8doctor.trial.state.optimizers import Settings, inner
from fp8doctor.trial.state.reached import reached
from fp8doctor.trial.state.transformer_engine_state import buffers_apart

PUT_BACK = "{} (put back)"


class Undisturbed:
    """Put everything back that replicas may change, whatever they did and whoever interrupts.

    Settings of the process (random numbers, flags, variables) are put back silently: a user's own forward may
    change them. What belongs to the user's model is put back and, afterwards, named in the list that the
    context gives. Inside, gradients are on and warnings are not shown: replicas say nothing that the model
    itself would not say. ``keep_workers`` leaves what compiling started to run, for one who compiles more and
    ends it then.

    Enter it twice, ``with kept, kept``: an interrupt may come at the very moment in which the first begins to
    put back, and the second does it then.
    """

    def __init__(self, job: Job, *, keep_workers: bool = False) -> None:
        torch_private.load_dynamo()  # whose settings are read
        self._named: list[str] = []
        self._settings, self._workers = settings.read(), None if keep_workers else dynamo_state.workers()
        self._handlers = self._settings.pop(settings.HANDLERS, {})
        found = reached(job.loss, job.training_step)
        roots = {id(each): each for each in (job.model, *found.modules)}.values()
        self._optimizers = Settings(
            [inner(each) for each in (job.optimizer, *found.optimizers) if each is not None]
        )
        self._belongings = Belongings(roots)
        self._entries = dynamo_state.Entries(job.model, job.loss, job.training_step)
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
        """Put all of it back. What fails costs nothing of the rest, and is raised at the end."""
        with ExitStack() as last_first:
            last_first.callback(self._clear_autocast)
            last_first.callback(self._forget_compiled)
            if self._workers is not None:
                last_first.callback(dynamo_state.stop_new_workers, self._workers)
            last_first.callback(settings.put_back, self._settings)
            last_first.callback(self._put_optimizers_back)
            last_first.callback(self._put_belongings_back)
            last_first.callback(self._around.close)

    def _put_belongings_back(self) -> None:
        self._named += map(PUT_BACK.format, self._belongings.put_back())

    def _put_optimizers_back(self) -> None:
        if self._optimizers.put_back():
            self._named.append(PUT_BACK.format("optimizer settings"))

    def _forget_compiled(self) -> None:
        if not self._entries.put_back():
            self._named.append("compiled code of the model")

    def _clear_autocast(self) -> None:
        if any(settings.alike(self._settings.get(f"autocast: {device}"), True) for device in ("cpu", "cuda")):
            torch.clear_autocast_cache()


def free(device: torch.device) -> None:
    """Give memory back, cuBLAS's workspaces (66 MiB on an H200) included where torch can free
    them."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch_private.clear_cublas_workspaces()
            torch.cuda.empty_cache()
