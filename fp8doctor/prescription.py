"""Findings to a plan: what to change, in which order, with symptoms left out whose cause is treated already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from fp8doctor.cures import STAY_IN_BF16, keep_in_bf16
from fp8doctor.facts import Facts
from fp8doctor.finding import SEVERITIES, Finding, Saving, Treatment
from fp8doctor.record import Record

if TYPE_CHECKING:
    from torch.nn import Module


class Step(Record, frozen=True, kw_only=True):
    """One line of the prescription: a treatment and the findings that it mends."""

    code: str
    """The finding that ranks it, the worst it mends; empty when the trial found it and no check names it."""
    mends: tuple[str, ...]
    """Codes of all findings that share this treatment, ``code`` first."""
    title: str
    treatment: Treatment
    saving_ms: Saving | None = None
    """Of one step. Savings of several lines do not add up."""


class Prescription(tuple[Step, ...]):
    """The plan: its steps in order, and a way to carry them out."""

    facts: Facts

    def __new__(cls, steps: Iterable[Step] = (), facts: Facts | None = None) -> Prescription:
        plan = super().__new__(cls, steps)
        plan.facts = facts if facts is not None else Facts()
        return plan

    def apply(self, model: Module) -> Any:
        """Carry out on ``model`` what is a change of a model, by the functions that were timed; return it, or what stands for it.

        It is changed in place where that is possible. What is no change of a model (environment, optimizer, batch, autocast)
        or does not apply is named in one warning.
        """
        from fp8doctor.trial.treatments import carry_out

        return carry_out((step.treatment for step in self), model, self.facts)


def prescribe(findings: Iterable[Finding], explained_by: Mapping[str, tuple[str, ...]], facts: Facts | None = None) -> Prescription:
    """Rank the treatments of ``findings``: what makes FP8 impossible first, then by ms saved, then by severity.

    To give FP8 up comes last: it is measured against FP8 with all other steps.
    ``explained_by`` maps a code to the codes that cause it; a symptom whose cause was found too, as more than
    information, is dropped, and so is information that saves nothing. Findings that name the same treatment become one step.
    """
    findings = tuple(findings)
    found = {finding.code for finding in findings if finding.severity != "info"}
    steps: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.treatment is None or found.intersection(explained_by.get(finding.code, ())):
            continue
        if finding.severity == "info" and (finding.saving_ms is None or finding.saving_ms.high <= 0):
            continue
        steps.setdefault(finding.treatment.name, []).append(finding)
    ranked = sorted(steps.values(), key=lambda group: min(map(_rank, group)))
    return Prescription((_step(sorted(group, key=_rank), facts) for group in ranked), facts)


def _rank(finding: Finding) -> tuple[bool, bool, float, int, str]:
    gives_up = finding.treatment is not None and finding.treatment.name == STAY_IN_BF16.name
    blocks_fp8 = finding.severity == "error"
    saved = finding.saving_ms.middle if finding.saving_ms else 0.0
    return gives_up, not blocks_fp8, -saved, -SEVERITIES.index(finding.severity or "info"), finding.code


def _step(group: list[Finding], facts: Facts | None) -> Step:
    worst = group[0]
    assert worst.treatment is not None
    return Step(
        code=worst.code,
        mends=tuple(finding.code for finding in group),
        title=worst.title,
        treatment=_for_all(worst.treatment, group, facts),
        saving_ms=worst.saving_ms,
    )


def _for_all(treatment: Treatment, group: list[Finding], facts: Facts | None) -> Treatment:
    """The treatment with the layers of every finding that names it."""
    layers = tuple(dict.fromkeys(layer for finding in group if finding.treatment for layer in finding.treatment.layers))
    if set(layers) == set(treatment.layers):
        return treatment
    return keep_in_bf16(layers, facts) if treatment.name == "keep-in-bf16" else msgspec.structs.replace(treatment, layers=layers)
