"""The conductor of a trial: which arms are built in which order, within the budget, and what becomes of one that fails.

What is dropped last comes first: as it is, both BF16 baselines, the prescription, then single treatments, then what nobody
proposed. An arm that fails (out of memory, a compile error) costs itself and nothing else; an arm without proof that it
ran what its label says has no number but a reason. The arms that the report compares are explained by the very profile
that proves them (`fp8doctor.trial.trace`). `fp8doctor.trial.combining` makes one prescription of what gained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from fp8doctor.facts import Trial
from fp8doctor.job import Job
from fp8doctor.measured import COMBINATION, NO_TIME_LEFT, STEP_RAISES
from fp8doctor.trial.bench import SELF_CHECK, Attempt, Bench, DeviceLost, sentence
from fp8doctor.trial.combining import Window, best_total
from fp8doctor.trial.digest import NO_DOUBT, digest, harm, what_harm
from fp8doctor.trial.numerics import NUMERICS, with_numerics
from fp8doctor.trial.replica import NotReplicable, OriginalTouched
from fp8doctor.trial.results import gpu_name, report
from fp8doctor.trial.trace import BREAKDOWN, KeepTrace, Tracer
from fp8doctor.trial.undisturbed import free, undisturbed
from fp8doctor.trial.variant import ArmPlan

WINDOW_SHARE, PROOF_SHARE = 0.4, 0.1
"""Shares of the budget kept for the timed window with what follows it, and for the proof of each arm alone; building and
compiling may use the rest."""

EXPLORING_SHARE, FINAL_SHARE = 0.5, 0.25
"""With explorations: the share of the budget after which no further one is built, and the share kept for what they give
together, which may begin while half of that is left."""

LAST_PROFILE = 2.0
"""Budgets after which no further step is profiled: what is left is proven without."""


def conduct(
    job: Job,
    lists: Sequence[str],
    arms: Sequence[ArmPlan],
    device: torch.device,
    *,
    budget_s: float,
    progress: Callable[[str, str | None], None],
    skip: Mapping[str, str] | None = None,
    keep_trace: KeepTrace | None = None,
    spent_s: float = 0.0,
) -> Trial:
    """Time ``arms`` of the job on ``device`` within ``budget_s`` seconds, in the order of their importance, and do no harm.

    ``lists`` names the lists of repeated blocks, ``skip`` maps arms that are not to be built to the reason. ``keep_trace`` is
    handed the trace of every arm that is profiled. ``spent_s`` of the budget are gone already. A model that cannot be copied,
    or whose own step raises, gives a Trial with a reason and no times.

    Raises `DeviceLost` when an arm took the GPU's context down, so that a new process can go on without it.
    """
    began = time.monotonic() - spent_s
    if job.batch is None:
        return _without_times(device, "there is no batch to run it on; give one, as example_batch() in a model file", budget_s, began)
    before = digest(job)
    with undisturbed(job) as put_back:
        trial = _timed(job, lists, arms, device, budget_s, began, progress, skip or {}, keep_trace)
    return _with_harm(trial, (*put_back, *harm(before, digest(job))))


def _timed(
    job: Job, lists: Sequence[str], arms: Sequence[ArmPlan], device: torch.device, budget_s: float, began: float,
    progress: Callable[[str, str | None], None], skip: Mapping[str, str], keep_trace: KeepTrace | None,
) -> Trial:  # fmt: skip
    """The trial itself; what it leaves behind is its caller's concern."""
    try:
        bench = Bench(job, lists, device)
    except (NotReplicable, OriginalTouched) as error:
        return _without_times(device, str(error), budget_s, began)
    except torch.OutOfMemoryError:
        return _without_times(device, "the memory of the GPU is too small for even a cut of the model", budget_s, began)
    except Exception as error:
        return _without_times(device, f"{STEP_RAISES}{sentence(error)}", budget_s, began)
    attempts = [Attempt(plan, reason=skip.get(plan.name)) for plan in arms]
    tracer = Tracer(bench, progress, keep_trace, reason_against=skip.get(BREAKDOWN), until=began + LAST_PROFILE * budget_s)
    _build(bench, attempts, budget_s, began, progress)
    timed = [attempt for attempt in attempts if attempt.reason is None]
    progress(f"timing {len(timed)} variants of the step", None)
    try:
        kept = FINAL_SHARE if any(explores(attempt.plan) for attempt in timed) else PROOF_SHARE
        samples = bench.time(timed, until=began + budget_s * (1 - kept))
        late = time.monotonic() - began > budget_s * (1 - FINAL_SHARE / 2)
        tracer.explain(timed, samples)
        progress("proving what each variant ran", None)
        for attempt in timed:
            if attempt.proof is None:
                bench.prove(attempt)
        against = skip.get(COMBINATION) or (_used_up(budget_s) if late else None)
        final = best_total(Window(bench, attempts, samples), until=began + budget_s, reason_against=against, progress=progress)
        if final:
            tracer.explain(final.attempts, final.samples)
        bench.time_in_pairs(attempts, samples, tracer, until=began + budget_s)
        trial = report(
            bench.plan, device, attempts, samples, final, health=bench.health(), gaps=tracer.gaps, budget_s=budget_s, elapsed_s=time.monotonic() - began
        )  # fmt: skip
        progress("measuring what FP8 does to each layer", NUMERICS)
        no_time = _used_up(budget_s) if time.monotonic() - began > budget_s else None
        trial = with_numerics(trial, bench, until=began + budget_s, against=skip.get(NUMERICS) or no_time)
    except DeviceLost:
        raise
    except Exception as error:
        trial = _without_times(device, f"a variant that had run before stopped the timing with {sentence(error)}", budget_s, began)
    final = None
    attempts.clear()
    timed.clear()
    bench.close()
    return msgspec.structs.replace(trial, elapsed_s=time.monotonic() - began)


def _build(bench: Bench, attempts: Sequence[Attempt], budget_s: float, began: float, progress: Callable[[str, str | None], None]) -> None:
    """Make every arm that is not to be skipped and for which there is time."""
    for attempt in attempts:
        if attempt.reason is not None:
            continue
        share = EXPLORING_SHARE if explores(attempt.plan) else 1 - WINDOW_SHARE
        if time.monotonic() - began > budget_s * share and attempt.plan.name != "as_is":
            attempt.reason = _used_up(budget_s)
            continue
        if attempt.plan.name == SELF_CHECK and not any(each.plan.name == "bf16" and each.reason is None for each in attempts):
            attempt.plan = replace(attempts[0].plan, name=SELF_CHECK)
        progress(f"building {in_words(attempt.plan.name)}", attempt.plan.name)
        bench.build(attempt)


def explores(plan: ArmPlan) -> bool:
    """Whether the arm may become a part of the prescription unasked; a mere measurement may not, and needs no final window."""
    return plan.explored and bool(plan.treatments)


def _used_up(budget_s: float) -> str:
    return f"the budget of {budget_s:g} s {NO_TIME_LEFT}"


def _with_harm(trial: Trial, changed: Sequence[str]) -> Trial:
    """The trial with what it changed outside its replicas, which makes its times doubtful too."""
    if not changed:
        return msgspec.structs.replace(trial, harm=())
    reason = "; ".join(filter(None, (trial.reason, what_harm(changed))))
    return msgspec.structs.replace(trial, harm=tuple(changed), reason=reason, reliable=trial.reliable and NO_DOUBT.issuperset(changed))


def _without_times(device: torch.device, reason: str, budget_s: float, began: float) -> Trial:
    free(device)
    return Trial(
        device=device.type, gpu=gpu_name(device), blocks={}, arms=(), self_check_ratio=None, reliable=False, reason=reason,
        budget_s=budget_s, elapsed_s=time.monotonic() - began,
    )  # fmt: skip


def in_words(arm: str) -> str:
    """What an arm is called where a person reads it."""
    named = {"as_is": "the step as it is", "bf16": "BF16", "bf16_compiled": "BF16, compiled", SELF_CHECK: "a copy to check the timing against"}
    return named.get(arm, arm.replace("_", " "))
