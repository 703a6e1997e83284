"""The bench: replicas of every cut with one set of weights, on which an arm is built, warmed up, timed and proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fp8doctor.job import Job
from fp8doctor.measured import NO_FP8_GEMM
from fp8doctor.trial import depth
from fp8doctor.trial.compiling import give_own_code
from fp8doctor.trial.depth import cleaned
from fp8doctor.trial.evidence import StepProof, compiled_so_far, executed, prove
from fp8doctor.trial.replica import NotReplicable, Tripwire, replicate, unwrapped
from fp8doctor.trial.step import like, move, optimizer_for, training_step
from fp8doctor.trial.timer import interleave
from fp8doctor.trial.treatments import NotTried, strip_compile_marks
from fp8doctor.trial.undisturbed import free
from fp8doctor.trial.variant import ArmPlan, Variant

LEAST_WARM_UP, MOST_WARM_UP = 3, 10
"""Steps of an arm before it is timed: until one compiles nothing, within these bounds."""

SELF_CHECK = "bf16_again"
"""The arm that is a replica of another, to check the timing against; it copies the step as it is where there is no eager
BF16 arm."""


@dataclass
class Ready:
    """An arm at one cut, warm and ready to be timed."""

    step: Callable[[], torch.Tensor]
    graphs: int
    breaks: int
    peak_gib: float | None
    warm_up_s: float
    frames_in_window: int = 0


@dataclass
class Attempt:
    """An arm on its way to a result: one `Ready` per cut, or the reason why there is none."""

    plan: ArmPlan
    ready: list[Ready] = field(default_factory=list)
    reason: str | None = None
    proof: StepProof | None = None


class DeviceLost(Exception):
    """An arm left the GPU unusable for this process (a sticky CUDA error). ``arm`` names it."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm = arm


class Bench:
    """The replicas of all cuts, with one set of weights and one optimizer state per cut."""

    def __init__(self, job: Job, lists: Sequence[str], device: torch.device, *, least: int = depth.LEAST_WORTH_CUTTING) -> None:
        self.job, self.device = job, device
        root = unwrapped(job.model)
        names = {cleaned(name): name for name, _ in root.named_modules()}
        self.plan = depth.plan(root, [names[name] for name in lists if name in names], least=least)
        self.batch = move(job.batch, device)
        self.bases: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        tripwire = Tripwire(unwrapped(job.model))
        for cut in self.plan.cuts:
            base, memo = replicate(job.model, device=device, cuts=cut.indices)
            self.bases.append(base.train())
            self.optimizers.append(optimizer_for(job, base.parameters(), memo))
            self._first_step(cut, tripwire)

    def _first_step(self, cut: depth.Cut, tripwire: Tripwire) -> None:
        """One eager step under the tripwire, which also counts the executed blocks and makes the optimizer's state."""
        probe = strip_compile_marks(replicate(self.bases[-1], share=True)[0])
        give_own_code(probe)
        blocks = [block for name in cut.kept for block in probe.get_submodule(cleaned(name)).children()]
        with tripwire.armed(), executed(blocks) as counts:
            training_step(self.job, self._variant(probe), self.optimizers[-1], self.device)()
        missed = [index for index, count in enumerate(counts) if count == 0]
        if missed:
            raise NotReplicable(f"a cut to {cut} blocks does not run all of them ({len(missed)} are skipped)")

    def _variant(self, model: nn.Module) -> Variant:
        """The step as it is, around a replica."""
        return Variant(model, self.batch, self.job.autocast)

    def _optimizer(self, variant: Variant, number: int) -> torch.optim.Optimizer:
        """The optimizer of the other arms, or one of its own over the variant's parameters when it changes one of the two."""
        shared = self.optimizers[number]
        held = {id(parameter) for group in shared.param_groups for parameter in group["params"]}
        trained = {id(parameter) for parameter in variant.model.parameters() if parameter.requires_grad}
        if variant.optimizer is None and trained <= held:
            return shared
        twins = dict(zip(map(id, self.bases[number].parameters()), variant.model.parameters(), strict=True))
        return like(shared, twins, variant.optimizer or {})

    def build(self, attempt: Attempt) -> None:
        """Make the arm at every cut and warm it up; on failure note the reason and free what it took.

        The replica of the self-check is made at the first cut only.
        """
        try:
            for number, base in enumerate(self.bases[:1] if attempt.plan.name == SELF_CHECK else self.bases):
                replica = replicate(base, share=True)[0]
                give_own_code(replica)
                variant = attempt.plan.make(self._variant(replica))
                optimizer = self._optimizer(variant, number)
                step = training_step(self.job, variant, optimizer, self.device)
                attempt.ready.append(self._warm(step, variant.model, optimizer))
        except (NotTried, NotReplicable) as error:
            attempt.reason = str(error)
        except torch.OutOfMemoryError:
            attempt.reason = "the GPU's memory is too small for it"
        except Exception as error:
            attempt.reason = f"it raises {sentence(error)}"
        if attempt.reason is not None:
            attempt.ready.clear()
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._still_there(attempt)
            free(self.device)

    def _still_there(self, attempt: Attempt) -> None:
        """Raise `DeviceLost` when the failure of an arm left the GPU's context unusable."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise DeviceLost(attempt.plan.name, f"it took the GPU's context down: {sentence(error)}") from error

    def _warm(self, step: Callable[[], torch.Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Ready:
        began, first = time.monotonic(), compiled_so_far()
        for count in range(MOST_WARM_UP):
            before = compiled_so_far()
            if count == LEAST_WARM_UP - 1 and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
                allocated = torch.cuda.memory_allocated(self.device)
            step()
            if count >= LEAST_WARM_UP - 1 and compiled_so_far() == before:
                break
        peak = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            static_gib = _bytes_of(model, optimizer) / 2**30
            peak = static_gib + (torch.cuda.max_memory_allocated(self.device) - allocated) / 2**30
        last = compiled_so_far()
        return Ready(step, last.frames - first.frames, last.breaks - first.breaks, peak, time.monotonic() - began)

    def time(self, attempts: Sequence[Attempt], until: float) -> dict[tuple[str, int], list[float]]:
        """The interleaved window: samples in ms by arm and cut."""
        watched: dict[tuple[str, int], Callable[[], object]] = {}
        for attempt in attempts:
            for number, ready in enumerate(attempt.ready):
                watched[attempt.plan.name, number] = _watched(ready)
        return interleave(watched, self.device, until)

    def prove(self, attempt: Attempt) -> None:
        """Profile one step of the deepest cut and judge whether the arm ran what it says."""
        attempt.proof = prove(attempt.ready[-1].step, self.device)
        if attempt.plan.fp8 is True and attempt.proof.fp8_gemms == 0:
            attempt.reason = NO_FP8_GEMM
        elif attempt.plan.fp8 is False and attempt.proof.fp8_gemms:
            attempt.reason = f"{attempt.proof.fp8_gemms} FP8 GEMMs were seen in a BF16 step"
        elif any(ready.frames_in_window for ready in attempt.ready):
            attempt.reason = "it was still compiling while it was timed"

    def close(self) -> None:
        """Let go of every replica and give the memory back."""
        self.bases.clear()
        self.optimizers.clear()
        self.batch = None
        free(self.device)


def _watched(ready: Ready) -> Callable[[], object]:
    """The step, noting whether something was compiled in it."""

    def step() -> object:
        before = compiled_so_far().frames
        result = ready.step()
        ready.frames_in_window += compiled_so_far().frames - before
        return result

    return step


def _bytes_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, buffers and optimizer state, each tensor once."""
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *states]
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def sentence(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
