"""The report as one record: facts, findings, verdict and plan, saved as JSON."""

import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import field
from msgspec.structs import replace

from fp8doctor.analysis.arms import timed_on_cpu
from fp8doctor.analysis.treatment_table import STAY_IN_BF16
from fp8doctor.answer.verdict import GRAVE, Verdict, invalidates, why_not_engaged
from fp8doctor.areas import SEVERITIES, Severity
from fp8doctor.errors import UserError
from fp8doctor.facts import NOT_RECORDED, Facts, recorded
from fp8doctor.facts.record import (
    Record,
    UnreadableDocument,
    decode,
    encode,
    from_builtins,
    schema_of,
    to_builtins,
)
from fp8doctor.files import regular
from fp8doctor.finding import Breaks, Finding, Outcome, Saving, Treatment
from fp8doctor.version import VERSION
from fp8doctor.wording import quoted

SCHEMA_VERSION = 2
"""Raised only when a key is renamed or changes its meaning; new keys keep it."""

EXPLAIN = "fp8doctor explain "
"""Start of a command that shows a page."""

LARGEST_REPORT = 256 * 2**20
"""Bytes; the reports of 8B models with a trial have 0.7 MiB, and one of 171 MiB takes 35 s to show."""


class Tool(Record, frozen=True, kw_only=True):
    """The program that wrote the report."""

    name: str = "fp8doctor"
    version: str = ""


class Step(Record, frozen=True, kw_only=True):
    """One line of the prescription: a treatment and the findings that it fixes."""

    code: str
    """The finding that ranks it, the worst it fixes; empty if the trial found it and no check names it."""
    mends: tuple[str, ...]
    """Codes of all findings that share this treatment, ``code`` first."""
    names: tuple[str, ...] = ()
    """Their names, in the same order: several findings may have one code."""
    title: str
    treatment: Treatment
    saving_ms: Saving | None = None
    """Of one training step. Measured ones are of the way to the plan's end, and add up to its total."""
    together: tuple[str, ...] = ()
    """Names of the treatments that it saves time together with; the first of them has the saving."""
    peak_gib: float = NOT_RECORDED
    """The estimated peak after it, of what makes the job of the plan fit; set only there."""
    breaks: Breaks = NOT_RECORDED
    """What it ends, of what leaves FP8 off and ends breakage; set only there."""

    @property
    def removes_fp8_on_an_estimate(self) -> bool:
        """Return whether it goes back to BF16 for a speed that no trial timed, which only the user may do."""
        timed = self.saving_ms is not None and self.saving_ms.basis == "measured"
        return self.treatment.name == STAY_IN_BF16 and not timed and self.get("breaks") != "step_raises"

    def __repr__(self) -> str:
        saving = self.saving_ms
        saves = f", saves {saving.low:.1f} to {saving.high:.1f} ms/step ({saving.basis})" if saving else ""
        return f"<{self.code or 'trial'} {self.treatment.name}: {quoted(self.treatment.summary)}{saves}>"


class Next(Record, frozen=True, kw_only=True):
    """The next thing to do."""

    command: str
    """To type now."""
    saving_ms: Saving | None
    """Its saving per step; None if unknown."""
    verify: str | None
    """Looks at the job again; None for a live model, which is inspected again."""


class Document(Record, frozen=True, kw_only=True):
    """Everything fp8doctor has to say about one job."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    """In the order of the areas."""
    prescription: tuple[Step, ...]
    """Its steps in order."""
    outcomes: tuple[Outcome, ...]
    """One for every check that was selected."""
    next: Next | None = None
    """None if nothing is left to do."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Code, or how it begins -> why its checks were left out; not written if nothing is ignored with a
    reason."""
    answer: Any = None
    """The `fp8doctor.answer.record.Answer` that verdict and screens are written from; not saved."""
    modelled_gpu: str = ""
    """The GPU that modelled numbers are of: its name in the datasheet table; as assumed if it has none."""
    tool: Tool
    created_at: str
    """UTC, ISO 8601, to the second."""
    facts: Facts
    """What a replay needs; ``--format json`` leaves them out if a model was examined."""

    def to_dict(self, *, facts: bool = True) -> dict[str, Any]:
        """Write the report as plain values, as `report.schema.json` describes them.

        Without ``facts`` it fits an agent: the names of layers that a treatment changes are left out too.
        """
        data = to_builtins(replace(self, answer=None))
        del data["answer"], data["facts"]
        if not self.ignored:
            del data["ignored"]
        if facts:
            return {"schema_version": SCHEMA_VERSION, **data, "facts": self.facts.to_dict()}
        for each in (*data["findings"], *data["prescription"]):
            (each.get("treatment") or {}).pop("layers", None)
        return {"schema_version": SCHEMA_VERSION, **data}

    def to_json(self, *, facts: bool = True) -> str:
        """Write the JSON document, the same bytes for the same report."""
        return encode(self.to_dict(facts=facts)).decode()

    @property
    def gpu_speedup(self) -> float | None:
        """Return the verdict's speedup if a GPU measured it; the end that is sure if its size is open."""
        said = self.verdict
        sure = {"fp8_slower": said.speedup_high, "fp8_faster": said.speedup_low}.get(said.status)
        return (said.speedup or sure) if said.basis == "measured" and not self.on_cpu else None

    @property
    def on_cpu(self) -> bool:
        """Return whether a CPU took the times, which say nothing about a GPU."""
        return timed_on_cpu(self.facts)

    def worst(self) -> Severity | None:
        """Return the highest severity of findings and verdict; None if nothing was found."""
        found = [finding.severity or "info" for finding in self.findings]
        grades = [SEVERITIES.index(each) for each in (*found, self.verdict_severity()) if each]
        return SEVERITIES[max(grades)] if grades else None

    def verdict_severity(self) -> Severity | None:
        slower = self.verdict.status == "fp8_slower" and self.gpu_speedup is not None
        fault = self.answer.fault if self.answer else None
        failed = fault is not None and fault.was_seen
        return "error" if slower or failed or self.verdict.status in GRAVE else None

    def why_not_in_fp8(self) -> str:
        """Say why no layer trains in FP8, or what keeps it from training as it should; empty if it does."""
        if why := why_not_engaged(self.facts):
            return why
        for each in self.findings:  # layers that run in FP8 do so whatever the environment asks for
            keeps_out = each.severity == "error" and each.area != "environment" and invalidates(each)
            if recorded(each, "breaks") or keeps_out:
                return f"{each.title.rstrip('.')} ({each.code})."
        return self.verdict.summary if self.verdict.status == "step_raises" else ""

    def reaches(self, severity: Severity) -> bool:
        worst = self.worst()
        return worst is not None and SEVERITIES.index(worst) >= SEVERITIES.index(severity)


def tool() -> Tool:
    return Tool(version=VERSION)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_saved(path: str | Path) -> tuple[Facts, Tool, str]:
    """Return facts, tool and time of a saved report. Raises `UserError` for one that is no report."""
    path = Path(path)
    try:
        data = decode(_content(path))
        if not isinstance(data, dict) or "schema_version" not in data or "facts" not in data:
            raise UnreadableDocument("it is JSON, but not a report with facts, as 'fp8doctor --save' writes")
        version = data["schema_version"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise UnreadableDocument(f"its schema_version is {version!r}")
        if version > SCHEMA_VERSION:
            raise UnreadableDocument(
                f"it was written by a newer fp8doctor (schema {version}, this one reads up to "
                f"{SCHEMA_VERSION}); upgrade fp8doctor"
            )
        facts = Facts.from_dict(data["facts"])
        if impossible := contradiction(facts):
            raise UnreadableDocument(impossible)
        saved_tool = from_builtins(Tool, data.get("tool", {}))
        created_at = data.get("created_at")
        return facts, saved_tool, created_at if isinstance(created_at, str) else ""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except zlib.error as error:
        raise UserError(f"cannot replay {path}: its gzip content is damaged ({error})") from None
    except UnreadableDocument as error:
        raise UserError(f"cannot replay {path}: {quoted(str(error))}") from None


def _content(path: Path) -> bytes:
    """Read a report's file, unpacked. Raises `UserError` for pipes, devices and huge files."""
    if regular(path).st_size <= LARGEST_REPORT:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(content, LARGEST_REPORT + 1)
        if len(content) <= LARGEST_REPORT:
            return content
    raise UserError(f"cannot read {path}: it is larger than {LARGEST_REPORT >> 20} MiB, which no report is")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a report, generated from the records."""
    document = schema_of(Document, "fp8doctor report")
    document["$ref"] = "#/$defs/Report"
    definition = document["$defs"]["Report"] = document["$defs"].pop("Document") | {"title": "Report"}
    del definition["properties"]["answer"]
    definition["properties"] = {
        "schema_version": {"type": "integer", "const": SCHEMA_VERSION},
        **definition["properties"],
    }
    definition["required"] = ["schema_version", *(each for each in definition["required"] if each != "facts")]
    del document["$defs"]["Facts"]["properties"]["unrecognized"]
    return document


def contradiction(facts: Facts) -> str | None:
    of, adapters = facts.get("network.parameters"), facts.get("network.adapter_parameters")
    if of is not None and adapters is not None and not 0 <= adapters <= of:
        return f"it says that {adapters} of {of} parameters are the adapters'"
    for arm in facts.arms():
        times = arm.get("step_ms", 1.0), min(arm.get("rounds_ms", (1.0,)), default=0.0)
        if arm.get("tried") and not (all(each and each > 0 for each in times) and arm.get("cuts", True)):
            return f"it says that {arm.get('name', 'a variant')!r} was timed, and has no times above 0"
        if min(arm.get("breakdown.families_ms", {}).values(), default=0) < 0:
            return "it says that a family of kernels took less than 0 ms"
    return None
