"""What a trial leaves as it was, whether it returns or raises: the process's settings, the user's model, the
memory of the GPU.

`fp8doctor.trial.state.digest` then says what could not be left so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from fp8doctor.examine.allocator import not_the_users
from fp8doctor.loading.job import Job
from fp8doctor.trial.state import dynamo_state, settings
from fp8doctor.trial.state.belongings import Belongings
from fp8doctor.trial.state.optimizers import Settings, inner
from fp8doctor.trial.state.reached import reached
from fp8doctor.trial.state.transformer_engine_state import buffers_apart

PUT_BACK = "{} (put back)"


@contextmanager
def undisturbed(job: Job, *, keep_workers: bool = False) -> Iterator[list[str]]:
    """Put everything back that replicas may change, whatever they did.

    Settings of the process (random numbers, flags, variables) are put back silently: a user's own forward may
    change them. What belongs to the user's model is put back and, afterwards, named in the yielded list.
    Inside, gradients are on and warnings are not shown: replicas say nothing that the model itself would not
    say. ``keep_workers`` leaves what compiling started to run, for one who compiles more and ends it then.
    """
    import torch._dynamo.eval_frame
    import torch._dynamo.utils

    named: list[str] = []
    before, workers = settings.read(), dynamo_state.workers()
    found = reached(job.loss, job.training_step)
    roots = {id(each): each for each in (job.model, *found.modules)}.values()
    optimizers = Settings([inner(each) for each in (job.optimizer, *found.optimizers) if each is not None])
    belongings, entries = Belongings(roots), dynamo_state.Entries(job.model, job.loss, job.training_step)
    try:
        with (
            not_the_users(),
            buffers_apart(),
            warnings.catch_warnings(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            warnings.simplefilter("ignore")
            belongings.take_gradients()
            yield named
    finally:
        named += map(PUT_BACK.format, belongings.put_back())
        named += [PUT_BACK.format("optimizer settings")] if optimizers.put_back() else []
        settings.put_back(before)
        if not keep_workers:
            dynamo_state.stop_new_workers(workers)
        if not entries.put_back():
            named.append("compiled code of the model")
        if settings.alike(before.get("autocast: cpu"), True) or settings.alike(
            before.get("autocast: cuda"), True
        ):
            torch.clear_autocast_cache()


def free(device: torch.device) -> None:
    """Give memory back, cuBLAS's workspaces (66 MiB on an H200) included where torch has the private call for
    it."""
    gc.collect()
    if device.type == "cuda":
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
