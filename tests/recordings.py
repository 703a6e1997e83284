"""The tables of the recordings: ``python -m tests.recordings`` writes them, `tests.test_recorded` and
`tests.running.test_recorded` hold them."""

from __future__ import annotations

from pathlib import Path

from fp8doctor import Report, load_report
from fp8doctor.facts import Facts
from tests.markdown import table

HERE = Path(__file__).parent

HEADS = {
    HERE / "patients" / "recorded": """# The recordings

Reports of the patients in `tests/patients/`, saved on real GPUs by `tests/patients/record.py`. They are never
edited. The verdict and the codes are what this version says of their facts; `python -m tests.recordings`
writes this page.

""",
    HERE / "running" / "recorded": """# Scripts under `fp8doctor run`, recorded

Reports of training scripts that ran under `fp8doctor run` on real GPUs, saved with `--save`; never edited.
Those of `h200x2` ran on two GPUs with NCCL under torchrun (`tests/running/ranks/record.py`).
`te_loop_stopped` (`--stop`) and `eager_loop_timed_at_end` (`--trial`) are one plain loop with deterministic
algorithms, in Transformer Engine and in eager torchao; `foreign_trl` is `trl.scripts.sft` as released;
`unsloth_lora` and `unsloth_load_in_fp8` are patients that train as scripts; the others are `examples/`, with
the arguments of `tests/benchmarks/examples_gpu.py`. Where a report holds no profile, a defect of that day
kept torch from recording kernels. The two of Unsloth open an autocast around calls that could not be watched,
so it is not recorded and LORA002 is unknown. The verdict and the codes are what this version says of their
facts; `python -m tests.recordings` writes this page.

""",
}
"""What the page of each folder begins with."""

COLUMNS = ("recording", "GPU", "torch", "torchao", "TE", "recorded", "trial", "verdict", "codes")


def page(folder: Path) -> str:
    rows = [row(path.stem, load_report(path)) for path in sorted(folder.glob("*.json"))]
    return HEADS[folder] + table(COLUMNS, rows)


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
    for folder in HEADS:
        (folder / "README.md").write_text(page(folder), encoding="utf-8")
