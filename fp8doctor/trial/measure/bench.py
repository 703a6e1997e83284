"""Lay out truncated models, as deep as fit, and build every variant on them, or give up in time."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fp8doctor.analysis.compile_coverage import is_below
from fp8doctor.examine.marks import compile_mark, step_mark
from fp8doctor.facts.arm_names import ArmName, Reason
from fp8doctor.facts.no_number import NoNumber
from fp8doctor.loading.job import Job
from fp8doctor.stacks import recognise
from fp8doctor.stacks.looking import parameters_in
from fp8doctor.stacks.tensors import has_data, tensors
from fp8doctor.stacks.torch_private import frames_compiled
from fp8doctor.trial.copies import depth
from fp8doctor.trial.copies.compiling import give_own_code, records_cuda_graphs
from fp8doctor.trial.copies.depth import cleaned
from fp8doctor.trial.copies.replica import NotReplicable, cut_of, replicate, unwrapped
from fp8doctor.trial.copies.shards import is_stand_in
from fp8doctor.trial.copies.step import (
    Variant,
    VariantPlan,
    WatchedSteps,
    before_the_update,
    like,
    move,
    optimizer_for,
    own_loss,
    training_step,
)
from fp8doctor.trial.measure.attempt import Attempt, Ready, Samples, raised
from fp8doctor.trial.measure.budget import LEAST_WARM_UP, Overrun, TrialRun, abort_after, still_there
from fp8doctor.trial.measure.evidence import compilations, on_calls
from fp8doctor.trial.measure.memory import LEAVES, MemoryWatch, is_roomy, rounding
from fp8doctor.trial.measure.timer import Observer
from fp8doctor.trial.state.guard import Guard
from fp8doctor.trial.state.settings import Buffers, buffers_apart, free
from fp8doctor.trial.treatments.forms import without_compile_marks

_log = logging.getLogger("fp8doctor")

MOST_LOOKS = 5
"""Most steps of a cut until each block has run: LayerDrop skips some, by default in 0.1 of the steps."""

MOST_WARM_UP = 10
"""Most steps of a variant before it is timed: until one compiles nothing, after `LEAST_WARM_UP`."""

MOST_IN_A_GRAPH = 32
"""Most FP8 layers in a user's graph compiled whole, for 1 to 1.4 s each (H200). A choice: 40% of 90 s."""

Classes = dict[type[nn.Module], type[nn.Module]]
"""Class of a module -> its subclass with its own code."""


class Bench:
    """A trial in progress: its run, the truncated models with their weights, and the variants on them."""

    plan: depth.Plan
    """The plan that was laid out."""

    def __init__(
        self, job: Job, lists: Sequence[str], run: TrialRun, attempts: Sequence[Attempt] = ()
    ) -> None:
        """Lay out the truncated models. Raises `torch.OutOfMemoryError` if none fit."""
        device = run.device
        self.run, self.device, self.job = run, device, replace(job, loss=own_loss(job.loss, device))
        self.guard = run.guard or Guard(job)
        there = all(has_data(each) or is_stand_in(each) for each in job.model.parameters())
        if job.rebuild is None and not there:
            raise NotReplicable("the model has no weights (meta device or fake tensors)")
        if not all(map(has_data, tensors(job.batch))):
            raise NotReplicable(
                "the batch has no data (meta device or fake tensors); "
                "give one, as example_batch() in a model file"
            )
        self.batch = move(job.batch, device)
        self.bases: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.attempts = list(attempts)
        self.samples: Samples = {}
        self.failures: list[str] = []
        """Why steps could not be profiled."""
        self._rounding = rounding(job.model, device)
        self.at_work: str = ArmName.AS_IS
        """The variant that is built, timed or proven now."""
        root = unwrapped(job.model)
        within = depth.named_in(root, lists)
        self.as_one = bool(within and (step_mark(job.training_step) or one_graph(job.model, within)))
        """Whether one graph holds several blocks, so each depth is compiled again."""
        shallow = self.as_one or any(each.plan.if_host_waits for each in attempts)
        in_fp8 = (each.use == "training" for module in root.modules() for each in recognise(module, {}))
        own = self.as_one and sum(in_fp8) > MOST_IN_A_GRAPH
        plans = partial(depth.plans, root, within, as_one=shallow, own=own)
        self._usual, self._left = plans(), plans(roomy=is_roomy(root, device))
        """Plans that were not laid out yet, the deepest first."""
        self.lay_out()
        self.observer = Observer(device)

    @property
    def built(self) -> list[Attempt]:
        return [each for each in self.attempts if each.ready]

    @property
    def timed(self) -> list[Attempt]:
        """List the variants that nothing stopped."""
        return [each for each in self.attempts if each.no_number is None]

    def lay_out(self) -> bool:
        """Make the largest models left that fit, in place of these and of all variants.

        False if none is left: these stay. A deeper plan than usual has to leave memory for variants that take
        more. Raises `torch.OutOfMemoryError` if none fits.
        """
        if not self._left:
            return False
        while self._left:
            self.forget()
            self.plan = self._left.pop(0)
            usual = self.plan in self._usual
            if not usual:
                torch.cuda.reset_peak_memory_stats(self.device)
            with suppress(torch.OutOfMemoryError):  # which goes, and with it what it held of the step
                for cut in self.plan.cuts:
                    self._add(cut)
                whole = 0 if usual else torch.cuda.mem_get_info(self.device)[1]
                if usual or torch.cuda.max_memory_allocated(self.device) <= (1.0 - LEAVES) * whole:
                    return True
        self.forget()
        raise torch.OutOfMemoryError("the memory is too small for the smallest cuts")

    def forget(self) -> None:
        """Let go of the variants, the truncated models and their weights."""
        for attempt in self.attempts:
            attempt.ready.clear()
        self.bases.clear()
        self.optimizers.clear()
        free(self.device)

    def _add(self, cut: depth.Cut) -> None:
        """Make one cut and take an eager step, which makes the optimizer's state and shows what ran.

        In a frame of its own: after an error nothing may hold what does not fit.
        """
        job, base, memo = cut_of(self.job, cut, self.device)
        self.bases.append(base.train())
        self.optimizers.append(optimizer_for(job, base.parameters(), memo))
        probe = without_compile_marks(self.variant(replicate(self.bases[-1], share=True)[0]))
        give_own_code(probe.model)
        ran, missed = set[int](), 0
        lists = [probe.model.get_submodule(cleaned(name)) for name in cut]
        blocks = [block for held in lists for block in held.children()]
        with self.guard.armed(), on_calls(probe.model.modules(), lambda module, given: ran.add(id(module))):
            step = training_step(self.job, probe, self.optimizers[-1], self.device)
            for _ in range(MOST_LOOKS):
                WatchedSteps(step, self.optimizers[-1])()
                missed = sum(ran.isdisjoint(map(id, block.modules())) for block in blocks)
                if not missed:
                    break
        if missed:
            kept = depth.in_words(cut)
            raise NotReplicable(f"a cut to {kept} blocks does not run all of them ({missed} are skipped)")

    def variant(self, model: nn.Module) -> Variant:
        return Variant(model, self.batch, self.job.autocast, self.job.around)

    def build(self, attempt: Attempt, until: float = math.inf) -> None:
        """Build the variant at every depth and warm it up, or note why it failed.

        It is given up when the clock (``time.monotonic``) passes ``until``; in a user's process only between
        two depths. Raises `OriginalTouched` after a write to the user's objects.
        """
        self.at_work, began = attempt.plan.name, time.monotonic()
        try:
            with abort_after(until, interrupts=self.run.own_process):
                self._build_depths(attempt, until)
        except Overrun:
            took_s = time.monotonic() - began
            given_up = f"it was given up after {took_s:.0f} s, because no time was left to build it"
            attempt.no_number = NoNumber(Reason.NO_TIME_LEFT, given_up)
        except Exception as error:
            _log.debug("building %s raises", attempt.plan.name, exc_info=True)
            self.guard.look()
            attempt.no_number = raised(error)
        attempt.build_s = time.monotonic() - began
        if attempt.no_number is not None:
            self.drop(attempt, attempt.no_number)

    def drop(self, attempt: Attempt, no_number: NoNumber) -> None:
        """Note why a variant has no time, and free its memory."""
        attempt.no_number = no_number
        attempt.ready.clear()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        still_there(self.device, attempt.plan.name)
        free(self.device)

    def _build_depths(self, attempt: Attempt, until: float) -> None:
        """Build the variant at every depth; blocks compiled at the deepest serve all."""
        numbers = range(1 if attempt.plan.name == ArmName.SELF_CHECK else len(self.bases))
        made: dict[int, Ready] = {}
        own: Classes = {}
        as_one = self.as_one and not (attempt.plan.by_block and step_mark(self.job.training_step) is None)
        for number in numbers if as_one else reversed(numbers):
            if made and time.monotonic() >= until:
                raise Overrun
            ready = self._at_depth(attempt.plan, number, own)
            if made and own and ready.compiled.get("graphs") and ready.compiled.get("recompilations") != 0:
                ready = self._at_depth(attempt.plan, number, {})
            elif made and own:  # as many as at the depth that compiled them
                ready.compiled["graphs"] = next(iter(made.values())).compiled.get("graphs", 0)
            made[number] = ready
            # single blocks that are not recorded run the same graphs at other depths
            model, lists = ready.model, [stack.name for stack in self.plan.stacks]
            if as_one or one_graph(model, lists) or records_cuda_graphs(model):
                own = {}
        attempt.ready = [made[number] for number in numbers]

    def _at_depth(self, plan: VariantPlan, number: int, own: Classes) -> Ready:
        """Build the variant at one depth, with the classes of ``own``, and warm it up."""
        replica = replicate(self.bases[number], share=True)[0]
        give_own_code(replica, own)
        variant = plan.make(self.variant(replica))
        optimizer, parameters = self.optimizers[number], list(variant.model.parameters())
        held = {*map(id, parameters_in(optimizer))}
        if variant.fused or any(each.requires_grad and id(each) not in held for each in parameters):
            twins = dict(zip(map(id, self.bases[number].parameters()), parameters, strict=True))
            optimizer = like(optimizer, twins, {"fused": True, "foreach": None} if variant.fused else {})
        memory = MemoryWatch(variant.model, optimizer, self.device, self.batch, self.run.apart_gib)
        step = training_step(self.job, variant, optimizer, self.device, memory.at_backward)
        buffers: Buffers = {}

        def apart() -> torch.Tensor:
            """Keep Transformer Engine modules out of the other variants' amax updates."""
            with buffers_apart(buffers):
                return step()

        return self._warm(apart, memory)

    def _warm(self, step: Callable[[], torch.Tensor], memory: MemoryWatch) -> Ready:
        """Take steps until one compiles nothing; the last one is measured."""
        model, optimizer = memory.model, memory.optimizer
        on_gpu = self.device.type == "cuda"
        finish: Callable[[], None] = partial(torch.cuda.synchronize, self.device) if on_gpu else lambda: None
        watched = WatchedSteps(step, optimizer)
        with compilations(model) as compiled, before_the_update(optimizer, memory.at_update):
            for count in range(MOST_WARM_UP):
                before = frames_compiled()
                if count >= LEAST_WARM_UP - 1:
                    finish()
                if count == LEAST_WARM_UP - 1:
                    memory.begin()
                stepped = time.monotonic()
                # a GPU's backward has a thread of its own, which no alarm can interrupt while it compiles
                compiles = self.run.own_process and count < LEAST_WARM_UP - 1
                one_thread = torch.autograd.set_multithreading_enabled(False) if compiles else nullcontext()
                with self.guard.armed() if count == 0 else nullcontext(), one_thread:
                    watched()
                launched_s = time.monotonic() - stepped if on_gpu else None
                self.guard.look()
                if count >= LEAST_WARM_UP - 1 and frames_compiled() == before:
                    break
            finish()
            step_s = time.monotonic() - stepped
        # a job of shards takes less, and the allocator does not count the memory of CUDA graphs
        counts = on_gpu and self.job.sharded is None and not records_cuda_graphs(model)
        return Ready(
            step=watched.unwatched(),
            model=model,
            compiled=compiled,
            memory=memory.end(self._rounding if counts else None),
            step_s=step_s,
            launched_s=launched_s,
            non_finite=watched.non_finite(),
        )

    def close(self) -> None:
        self.observer.close()
        self.forget()
        self.batch = None


def one_graph(model: nn.Module, lists: Sequence[str]) -> bool:
    """Return whether a list of blocks or one of its parents is compiled."""
    marks = (
        compile_mark(module, "")
        for name, module in model.named_modules()
        if not name or any(is_below(cleaned(each), cleaned(name)) for each in lists)
    )
    return any(mark and mark.compiles is not False for mark in marks)
