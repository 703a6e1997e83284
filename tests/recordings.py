"""The table of the recordings: ``python -m tests.recordings`` writes it, `tests.test_recorded` holds it."""

from __future__ import annotations

from pathlib import Path

from fp8doctor import Report, load_report
from fp8doctor.facts import Facts
from tests.readme import table

RECORDED = Path(__file__).parent / "patients" / "recorded"
PAGE = RECORDED / "README.md"

HEAD = """# The recordings

Reports of the patients in `tests/patients/`, saved on real GPUs by `tests/patients/record.py`. They are never
edited. The verdict and the codes are what this version says of their facts; `python -m tests.recordings`
writes this page.

"""

COLUMNS = ("recording", "GPU", "torch", "torchao", "TE", "recorded", "trial", "verdict", "codes")


def page() -> str:
    rows = [row(path.stem, load_report(path)) for path in sorted(RECORDED.glob("*.json"))]
    return HEAD + table(COLUMNS, rows)


def row(name: str, report: Report) -> tuple[str, ...]:
    facts = report.facts
    return (
        name,
        ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus if gpu.visible is not False)),
        facts.software.torch,
        version(facts, "torchao"),
        version(facts, "transformer_engine"),
        report.created_at[:10],
        "yes" if "trial" in facts.to_dict() else "no",
        report.verdict.status,
        " ".join(finding.code for finding in report.findings) or "-",
    )


def version(facts: Facts, package: str) -> str:
    installed = facts.software.packages.get(package)
    return installed.version or "?" if installed else "-"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
