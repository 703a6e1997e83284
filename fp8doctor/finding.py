"""A check's answer: a finding with evidence, fix and saving; or not applicable."""

from typing import Literal

from msgspec import field
from msgspec.structs import force_setattr

from fp8doctor.areas import Severity as Severity
from fp8doctor.code_snippets import SnippetKind, kind_of, with_imports
from fp8doctor.facts.record import NOT_RECORDED, Prose, Record, Value
from fp8doctor.wording import escaped, minus

Basis = Literal["measured", "modelled", "rule"]

Breaks = Literal["step_raises", "layers_do_not_learn", "not_finite"]
"""Effect on a job besides its speed, most severe first; it decides the verdict."""


class Saving(Record, frozen=True, kw_only=True):
    """Time that a fix saves per step, in ms; negative if it costs time.

    ``basis`` says how that is known.
    """

    low: float
    high: float
    basis: Basis
    gpu: str | None = None
    """The GPU that was measured or modelled."""
    from_ms: float | None = None
    """Step time without the fix, if both were timed; None otherwise."""
    to_ms: float | None = None
    """Step time with it."""

    @property
    def middle(self) -> float:
        """Compute the difference of the two times as shown, else the midpoint, in ms."""
        if self.from_ms is None or self.to_ms is None:
            return (self.low + self.high) / 2
        return minus(self.from_ms, self.to_ms)


class Treatment(Record, frozen=True, kw_only=True):
    """One change: a description, and the lines to write."""

    name: str
    """Short and stable, such as ``compile-blocks``; equal names are one treatment."""
    summary: str
    code: str
    """Python (with its imports), shell or YAML lines; none of the user's source code."""
    layers: tuple[str, ...] = ()
    """Names of the changed modules, as in the facts; empty if the name is enough."""
    tokens: int = NOT_RECORDED
    """Of a micro-batch afterwards, if it changes them."""
    kind: SnippetKind = "python"
    """``python`` runs unchanged in a training script, a ``sketch`` does not; ``yaml`` is for a framework."""

    def __post_init__(self) -> None:
        super().__post_init__()
        code = with_imports(self.code)
        force_setattr(self, "code", code)
        if self.kind == "python":
            force_setattr(self, "kind", kind_of(code))


class Finding(Record, frozen=True, kw_only=True):
    """An issue that a check found. The engine adds the check's registered properties."""

    title: str
    """One line with numbers, such as ``168 of 168 FP8 Linears are not compiled``."""
    explanation: str
    """One to three sentences: the observation, its cost, and the source of the number."""
    evidence: dict[str, Value | tuple[Value, ...]] = field(default_factory=dict)
    """The proof. Keys end in a unit (``_ms``, ``_gib``, ``_pct``)."""
    saving_ms: Saving | None = None
    treatment: Treatment | None = None
    code: str = ""
    name: str = ""
    area: str = ""
    severity: Severity | None = None
    """None takes the check's severity."""
    caused_by: tuple[str, ...] = ()
    """Codes of other findings of the report that may be the cause of this one."""
    breaks: Breaks = NOT_RECORDED
    """Effect on the job; set only if it must be expected."""
    explains: Literal["memory"] = NOT_RECORDED
    """``memory`` if FP8 is heavier than BF16 by it; set only then, for else it explains time."""

    def __repr__(self) -> str:
        return f"<{' '.join(filter(None, (self.code, self.severity, self.name)))}: {escaped(self.title)}>"


class NotApplicable(Record, frozen=True, kw_only=True):
    """A check's answer if it does not apply: compile checks without FP8 layers."""

    reason: Prose


class Outcome(Record, frozen=True, kw_only=True):
    """The result of one check."""

    code: str
    outcome: Literal["fires", "refuted", "silent", "not_applicable", "unknown", "crashed"]
    reason: Prose | None = None
    missing: str = NOT_RECORDED
    """Path of the fact that an ``unknown`` check could not read; otherwise not set."""
    area: str = ""
