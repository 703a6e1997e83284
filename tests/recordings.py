"""The recordings: JSON packed by gzip, and the tables of them.

``python -m tests.recordings`` packs the JSON that programs recorded into the folders, and writes the tables.
"""

import gzip
from pathlib import Path

from fp8doctor import Report, load_report
from fp8doctor.facts import Facts
from tests.markdown import table

HERE = Path(__file__).parent
RESEARCH = HERE.parent / "research"

SUFFIX = ".json.gz"
ANSWERS = HERE / "answers.tsv"
"""What this version answers to each recording; `tests.test_every_recording` compares."""

FOLDERS = (
    *sorted(HERE.glob("*/recorded")),
    *(RESEARCH / "benchmarks" / of for of in ("measured", "results")),
    RESEARCH / "fixes" / "on_h100",
    RESEARCH / "reliability",
)
"""Folders whose JSON was recorded or measured, all of it."""

HEADS = {
    HERE / "patients" / "recorded": """# The recordings

Reports of the patients in `tests/patients/` and `research/patients/`, saved on real GPUs by
`research/record_patients.py`. They are never edited. The verdict and the codes are what this version says
of their facts; `python -m tests.recordings` writes this page.

""",
    HERE / "shared_gpu" / "recorded": """# Trials on a GPU that four jobs shared

Reports of the jobs of `research/benchmarks/jobs/`, `research/patients/` and `examples/`, saved on H200s
that ran four jobs each at a time, with a budget of 60 s: times are noisy, and much has none. Their answers
are held to what they may say, their times to nothing. Never edited. The verdict and the codes are what this
version says of their facts; `python -m tests.recordings` writes this page.

""",
    HERE / "running" / "recorded": """# Scripts under `fp8doctor run`, recorded

Reports of training scripts that ran under `fp8doctor run` on real GPUs, saved with `--save`; never edited.
Those of `h200x2` ran on two GPUs with NCCL under torchrun (`research/ranks/record.py`).
`te_loop_stopped` (`--stop`) and `eager_loop_timed_at_end` (`--trial`) are one plain loop with deterministic
algorithms, in Transformer Engine and in eager torchao; `foreign_trl` is `trl.scripts.sft` as released;
`unsloth_lora` and `unsloth_load_in_fp8` are patients that train as scripts; the others are `examples/`, with
the arguments of `research/benchmarks/examples_gpu.py`. Where a report holds no profile, a defect of that day
kept torch from recording kernels. The two of Unsloth open an autocast around calls that could not be watched,
so it is not recorded and STP004 is unknown. The verdict and the codes are what this version says of their
facts; `python -m tests.recordings` writes this page.

""",
}
"""What the page of each folder begins with."""

COLUMNS = ("recording", "GPU", "torch", "torchao", "TE", "recorded", "trial", "verdict", "codes")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def name_of(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


def text_of(path: Path) -> str:
    """Give the JSON of a recording, packed or just written."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()


def pack(path: Path) -> Path:
    """Put a packed recording in the place of a JSON file. Equal content gives equal bytes."""
    packed = path.with_name(f"{path.stem}{SUFFIX}")
    packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
    path.unlink()
    return packed


def answer(report: Report) -> str:
    """Write what programs read of a report in a line: verdict, speedup, ms as is, of BF16 and of the best,
    the codes and the fixes."""
    verdict = report.verdict
    numbers = (verdict.speedup, verdict.step_ms, verdict.bf16_step_ms, verdict.best_step_ms)
    return "\t".join(
        (
            verdict.status,
            verdict.basis or "-",
            *("-" if each is None else f"{each:.4g}" for each in numbers),
            " ".join(each.code for each in report.findings) or "-",
            " ".join(each.treatment.name for each in report.prescription) or "-",
        )
    )


def page(folder: Path) -> str:
    rows = [row(name_of(path), load_report(path)) for path in files(folder)]
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
        " ".join(dict.fromkeys(each.code for each in report.findings)) or "-",
    )


def version(facts: Facts, package: str) -> str:
    installed = facts.software.packages.get(package)
    return installed.version or "?" if installed else "-"


def main() -> None:
    for folder in FOLDERS:
        for path in folder.glob("*.json"):
            pack(path)
    for folder in HEADS:
        (folder / "README.md").write_text(page(folder), encoding="utf-8")
    every = sorted(path for folder in HERE.glob("*/recorded") for path in files(folder))
    reports = ((path, load_report(path)) for path in every if "health" not in path.parts)
    lines = (f"{path.relative_to(HERE)}\t{answer(report)}\n" for path, report in reports)
    ANSWERS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
