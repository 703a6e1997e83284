"""The trial: every arm built, proven and timed in turn, at every depth; its result is plain facts.

What is dropped last comes first: as it is, both BF16 baselines, the prescription, then single treatments. An arm that
fails (out of memory, a compile error) costs itself and nothing else; an arm without proof that it ran what its label
says has no number but a reason.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fp8doctor.facts import Arm, ArmCut, Trial
from fp8doctor.interval import interval
from fp8doctor.job import Job
from fp8doctor.measured import NO_FP8_GEMM, STEP_RAISES
from fp8doctor.trial import depth
from fp8doctor.trial.compiling import give_own_code
from fp8doctor.trial.depth import cleaned
from fp8doctor.trial.evidence import StepProof, compiled_so_far, executed, prove
from fp8doctor.trial.replica import NotReplicable, OriginalTouched, Tripwire, replicate, unwrapped
from fp8doctor.trial.step import move, optimizer_for, training_step
from fp8doctor.trial.timer import interleave
from fp8doctor.trial.treatments import NotTried, strip_compile_marks

LEAST_WARM_UP, MOST_WARM_UP = 3, 10
"""Steps of an arm before it is timed: until one compiles nothing, within these bounds."""

WINDOW_SHARE, PROOF_SHARE = 0.4, 0.1
"""Shares of the budget kept for the timed window with what follows it, and for the proof of each arm alone; building and
compiling may use the rest."""

SELF_CHECK_TOLERANCE = 0.02
"""BF16 against its own replica must come out at 1.00 within this, or the trial is called unreliable."""

SELF_CHECK = "bf16_again"
"""The name of that replica's arm; it copies the step as it is where there is no eager BF16 arm."""


@dataclass(frozen=True)
class ArmPlan:
    """One arm: its name, what makes it from a replica as it is, and whether FP8 GEMMs must be seen in it."""

    name: str
    make: Callable[[nn.Module], nn.Module]
    treatments: tuple[str, ...] = ()
    fp8: bool | None = None


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


def in_words(arm: str) -> str:
    """What an arm is called where a person reads it."""
    named = {"as_is": "the step as it is", "bf16": "BF16", "bf16_compiled": "BF16, compiled", SELF_CHECK: "a copy to check the timing against"}
    return named.get(arm, arm.replace("_", " "))


class DeviceLost(Exception):
    """An arm left the GPU unusable for this process (a sticky CUDA error). ``arm`` names it."""

    def __init__(self, arm: str, reason: str) -> None:
        super().__init__(reason)
        self.arm = arm


def conduct(
    job: Job,
    lists: Sequence[str],
    arms: Sequence[ArmPlan],
    device: torch.device,
    *,
    budget_s: float,
    progress: Callable[[str, str | None], None],
    skip: Mapping[str, str] | None = None,
) -> Trial:
    """Time ``arms`` of the job on ``device`` within ``budget_s`` seconds, in the order of their importance.

    ``lists`` names the lists of repeated blocks, ``skip`` maps arms that are not to be built to the reason. A model that
    cannot be copied, or whose own step raises, gives a Trial with a reason and no times.

    Raises `DeviceLost` when an arm took the GPU's context down, so that a new process can go on without it.
    """
    began = time.monotonic()
    if job.batch is None:
        return _without_times(device, "there is no batch to run it on; give one, as example_batch() in a model file", budget_s, began)
    with undisturbed():
        try:
            bench = _bench(job, lists, device)
        except (NotReplicable, OriginalTouched) as error:
            return _without_times(device, str(error), budget_s, began)
        except torch.OutOfMemoryError:
            return _without_times(device, "the memory of the GPU is too small for even a cut of the model", budget_s, began)
        except Exception as error:
            return _without_times(device, f"{STEP_RAISES}{_sentence(error)}", budget_s, began)
        attempts = [Attempt(plan, reason=(skip or {}).get(plan.name)) for plan in arms]
        for attempt in attempts:
            if attempt.reason is not None:
                continue
            if time.monotonic() - began > budget_s * (1 - WINDOW_SHARE) and attempt.plan.name != "as_is":
                attempt.reason = f"the budget of {budget_s:g} s was used up before it"
                continue
            if attempt.plan.name == SELF_CHECK and not any(each.plan.name == "bf16" and each.reason is None for each in attempts):
                attempt.plan = replace(attempts[0].plan, name=SELF_CHECK)
            progress(f"building {in_words(attempt.plan.name)}", attempt.plan.name)
            bench.build(attempt)
        timed = [attempt for attempt in attempts if attempt.reason is None]
        progress(f"timing {len(timed)} variants of the step", None)
        try:
            samples = bench.time(timed, until=began + budget_s * (1 - PROOF_SHARE))
            for attempt in timed:
                bench.prove(attempt)
            trial = bench.report(attempts, samples, budget_s, time.monotonic() - began)
        except Exception as error:
            trial = _without_times(device, f"a variant that had run before stopped the timing with {_sentence(error)}", budget_s, began)
        attempts.clear()
        timed.clear()
        bench.close()
    return trial


def _bench(job: Job, lists: Sequence[str], device: torch.device) -> Bench:
    """The bench for the whole model or its usual cuts; with smaller cuts when the whole does not fit."""
    try:
        return Bench(job, lists, device)
    except torch.OutOfMemoryError:
        _free(device)
    return Bench(job, lists, device, least=depth.DEEP_BLOCKS + 1)


def _without_times(device: torch.device, reason: str, budget_s: float, began: float) -> Trial:
    _free(device)
    return Trial(
        device=device.type, gpu=_gpu(device), blocks={}, arms=(), self_check_ratio=None, reliable=False, reason=reason,
        budget_s=budget_s, elapsed_s=time.monotonic() - began,
    )  # fmt: skip


def _gpu(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


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
        self.static_gib: list[float] = []
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
            self._step(probe, len(self.bases) - 1)()
        missed = [index for index, count in enumerate(counts) if count == 0]
        if missed:
            raise NotReplicable(f"a cut to {cut} blocks does not run all of them ({len(missed)} are skipped)")
        self.static_gib.append(_bytes_of(self.bases[-1], self.optimizers[-1]) / 2**30)

    def _step(self, model: nn.Module, number: int) -> Callable[[], torch.Tensor]:
        return training_step(self.job, model, self.batch, self.optimizers[number], self.device)

    def build(self, attempt: Attempt) -> None:
        """Make the arm at every cut and warm it up; on failure note the reason and free what it took.

        The replica of the self-check is made at the first cut only.
        """
        try:
            for number, base in enumerate(self.bases[:1] if attempt.plan.name == SELF_CHECK else self.bases):
                replica = replicate(base, share=True)[0]
                give_own_code(replica)
                model = attempt.plan.make(replica)
                attempt.ready.append(self._warm(self._step(model, number), number))
        except (NotTried, NotReplicable) as error:
            attempt.reason = str(error)
        except torch.OutOfMemoryError:
            attempt.reason = "the GPU's memory is too small for it"
        except Exception as error:
            attempt.reason = f"it raises {_sentence(error)}"
        if attempt.reason is not None:
            attempt.ready.clear()
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            self._still_there(attempt)
            _free(self.device)

    def _still_there(self, attempt: Attempt) -> None:
        """Raise `DeviceLost` when the failure of an arm left the GPU's context unusable."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                raise DeviceLost(attempt.plan.name, f"it took the GPU's context down: {_sentence(error)}") from error

    def _warm(self, step: Callable[[], torch.Tensor], number: int) -> Ready:
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
            peak = self.static_gib[number] + (torch.cuda.max_memory_allocated(self.device) - allocated) / 2**30
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

    def report(self, attempts: Sequence[Attempt], samples: dict[tuple[str, int], list[float]], budget_s: float, elapsed_s: float) -> Trial:
        """Medians with intervals, at every cut and at full depth, as plain facts."""
        ratio = self._self_check(attempts, samples)
        unreliable = ratio is not None and abs(ratio - 1) > SELF_CHECK_TOLERANCE
        return Trial(
            device=self.device.type,
            gpu=_gpu(self.device),
            blocks={cleaned(stack.name): stack.count for stack in self.plan.stacks},
            arms=tuple(self._arm(attempt, samples) for attempt in attempts if attempt.plan.name != SELF_CHECK),
            self_check_ratio=ratio,
            reliable=not unreliable,
            reason=f"the step timed against its own copy gives {ratio:.3f} instead of 1.00" if unreliable else None,
            budget_s=budget_s,
            elapsed_s=elapsed_s,
        )

    def _self_check(self, attempts: Sequence[Attempt], samples: dict[tuple[str, int], list[float]]) -> float | None:
        """The time of an arm / that of its own replica at the first cut, round by round; None when one was not timed."""
        names = [attempt.plan.name for attempt in attempts if attempt.reason is None]
        of = next((name for name in ("bf16", "as_is") if name in names), None)
        if of is None or SELF_CHECK not in names:
            return None
        return interval([a / b for a, b in zip(samples[of, 0], samples[SELF_CHECK, 0], strict=True)]).median

    def _full(self, samples: dict[tuple[str, int], list[float]], name: str) -> list[float]:
        """The step at full depth, one figure per round, because rounds share clocks and heat."""
        return [self.plan.full(values) for values in zip(*(samples[name, number] for number in range(len(self.plan.cuts))), strict=True)]

    def _arm(self, attempt: Attempt, samples: dict[tuple[str, int], list[float]]) -> Arm:
        if attempt.reason is not None or attempt.proof is None:
            return Arm(name=attempt.plan.name, treatments=attempt.plan.treatments, tried=False, reason=attempt.reason)
        full = self._full(samples, attempt.plan.name)
        cuts = []
        for number, (cut, ready) in enumerate(zip(self.plan.cuts, attempt.ready, strict=True)):
            at = interval(samples[attempt.plan.name, number])
            cuts.append(
                ArmCut(
                    blocks={cleaned(name): count for name, count in cut.kept.items()},
                    step_ms=at.median,
                    low_ms=at.low,
                    high_ms=at.high,
                    peak_gib=ready.peak_gib,
                    warm_up_s=ready.warm_up_s,
                    graphs_compiled=ready.graphs,
                    graph_breaks=ready.breaks,
                )
            )
        at = interval(full)
        peaks = [ready.peak_gib for ready in attempt.ready if ready.peak_gib is not None]
        return Arm(
            name=attempt.plan.name,
            treatments=attempt.plan.treatments,
            tried=True,
            reason=None,
            step_ms=at.median,
            low_ms=at.low,
            high_ms=at.high,
            rounds_ms=tuple(full),
            peak_gib=self.plan.full(peaks) if len(peaks) == len(self.plan.cuts) else None,
            cuts=tuple(cuts),
            fp8_gemms=attempt.proof.fp8_gemms,
            graphs_run=attempt.proof.graphs_run,
        )

    def close(self) -> None:
        """Let go of every replica and give the memory back."""
        self.bases.clear()
        self.optimizers.clear()
        self.batch = None
        _free(self.device)


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


def _free(device: torch.device) -> None:
    """Give memory back, cuBLAS's workspaces (66 MiB on an H200) included where torch has the private call for it."""
    gc.collect()
    if device.type == "cuda":
        with suppress(AttributeError, RuntimeError):
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Put back every random number generator and Dynamo's counters, whatever the replicas did."""
    from torch._dynamo.utils import counters

    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = _numpy_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    counted = {key: dict(value) for key, value in counters.items()}
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        counters.clear()
        for key, value in counted.items():
            counters[key].update(value)


def _numpy_state() -> object:
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
