"""The long kit: ``nice -n 10 python -m tests.reliability [PART ...]`` runs it, and writes the counts into
README.md."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

from tests.readme import table
from tests.reliability import command_lines, faults, growth, saved_reports, secrets, trees, trials
from tests.reliability.count import Count

PAGE = Path(__file__).with_name("README.md")

BEGIN, END = "<!-- counts -->\n", "<!-- end -->\n"

COLUMNS = ("what was tried", "tried", "passed", "failed", "CPU time", "versions", "commit", "date")

Part = Callable[[Path], Count]

PARTS: dict[str, Part] = {
    "trees": lambda folder: trees.looks(10_000),
    "trials": lambda folder: trials.trials(320),
    "beyond": lambda folder: trials.named(24),
    "faults": lambda folder: faults.faults(list(faults.FAULTS), folder, times=4),
    "deletions": saved_reports.deletions,
    "damages": lambda folder: saved_reports.damages(5_000, folder),
    "command-lines": lambda folder: command_lines.command_lines(1_600, folder),
    "secrets": lambda folder: secrets.scrubbed(),
    "growth": lambda folder: growth.growth(50, trial=False),
    "growth-with-trials": lambda folder: growth.growth(50, trial=True),
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    failed = 0
    for name in names or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            count = PARTS[name](Path(folder))
        for each in count.failures:
            print(f"{name}: {each}", file=sys.stderr)
        failed += len(count.failures)
        write(count)
    return min(failed, 1)


def write(count: Count) -> None:
    """Put the row of one part into the page, in the place of an older one."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    rows = {cells[0]: cells for cells in map(cells_of, old.splitlines()[2:])}
    rows[count.part] = row(count)
    PAGE.write_text(f"{before}{BEGIN}{table(COLUMNS, rows.values())}{END}{after}", "utf-8")


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def row(count: Count) -> tuple[str, ...]:
    numbers = (f"{number:,}" for number in (count.tried, count.passed, len(count.failures)))
    return count.part, *numbers, f"{count.seconds:.0f} s", versions(), commit(), date.today().isoformat()


def versions() -> str:
    import torch
    import torchao

    return f"Python {platform.python_version()}, torch {torch.__version__}, torchao {torchao.__version__}"


def commit() -> str:
    """The commit that was run, marked where the tree had changed."""
    words = ["git", "-C", str(PAGE.parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
