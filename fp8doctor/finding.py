"""What a check may say: a finding with its evidence, its treatment and what that saves."""

from __future__ import annotations

from typing import Literal

from msgspec import field
from msgspec.structs import force_setattr

from fp8doctor.areas import Severity as Severity
from fp8doctor.facts.record import Prose, Record, Value
from fp8doctor.facts.unrecorded import NOT_RECORDED
from fp8doctor.lines import Kind, kind_of, with_imports
from fp8doctor.wording import escaped

Basis = Literal["measured", "modelled", "rule"]

Breaks = Literal["step_raises", "layers_do_not_learn"]
"""What a disease does to a job besides its speed, the graver first; it decides the verdict."""


class Saving(Record, frozen=True, kw_only=True):
    """What a treatment saves of one step, in ms; negative when it costs. ``basis`` says how that is known."""

    low: float
    high: float
    basis: Basis
    gpu: str | None = None
    """The GPU that was measured or modelled."""

    @property
    def middle(self) -> float:
        """Half-way between low and high, in ms."""
        return (self.low + self.high) / 2


class Treatment(Record, frozen=True, kw_only=True):
    """One change, in words and as the lines a user would write."""

    name: str
    """Short and stable, such as ``compile-blocks``; two findings with the same name share one treatment."""
    summary: str
    code: str
    """Python, shell or YAML lines; no source code of the user's. Python gets the imports that it needs."""
    layers: tuple[str, ...] = ()
    """Names of the modules that it changes, as in the facts; empty when its name says it all."""
    kind: Kind = "python"
    """Of the lines: ``python`` runs in a training script as it stands, a ``sketch`` does not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        code = with_imports(self.code)
        force_setattr(self, "code", code)
        if self.kind == "python":
            force_setattr(self, "kind", kind_of(code))


class Finding(Record, frozen=True, kw_only=True):
    """A disease that was found. The engine fills in what the check's registration already says."""

    title: str
    """One line with numbers, such as ``168 of 168 FP8 Linears are not compiled``."""
    explanation: str
    """One to three sentences: what was seen, what it costs, how that is known."""
    evidence: dict[str, Value | tuple[Value, ...]] = field(default_factory=dict)
    """What proves it; a unit stands in the key (``_ms``, ``_gib``, ``_pct``)."""
    saving_ms: Saving | None = None
    treatment: Treatment | None = None
    code: str = ""
    name: str = ""
    area: str = ""
    severity: Severity | None = None
    """None takes the severity of the check."""
    caused_by: tuple[str, ...] = ()
    """Codes of the other findings of the report that may explain this one away."""
    breaks: Breaks = NOT_RECORDED
    """What the job does not survive; only there where it has to be expected."""

    def __repr__(self) -> str:
        return f"<{' '.join(filter(None, (self.code, self.severity, self.name)))}: {escaped(self.title)}>"


class NotApplicable(Record, frozen=True, kw_only=True):
    """A check's answer when its question does not arise, such as compile checks without any FP8 layer."""

    reason: Prose


class Outcome(Record, frozen=True, kw_only=True):
    """What became of one check."""

    code: str
    outcome: Literal["sick", "refuted", "healthy", "not_applicable", "unknown", "crashed"]
    reason: Prose | None = None
    missing: str = NOT_RECORDED
    """Dotted path of the fact that an ``unknown`` check could not read; only there."""
    area: str = ""
