"""The kit: ``nice -n 10 python -m research.reliability [--minutes N] [PART ...]`` runs it, and writes the
counts into README.md."""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

from research.reliability import command_lines, faults, growth, saved_reports, scripts, secrets, trees, trials
from research.reliability.count import Count, Enough
from tests.markdown import table

PAGE = Path(__file__).with_name("README.md")

BEGIN, END = "<!-- counts -->\n", "<!-- end -->\n"

COLUMNS = ("what was tried", "tried", "passed", "failed", "own CPU time", "versions", "commit", "date")

Part = Callable[[Path], Count]

PARTS: dict[str, Part] = {
    "trees": lambda folder: trees.looks(10_000),
    "trials": lambda folder: trials.trials(320),
    "beyond": lambda folder: trials.named(24),
    "faults": lambda folder: faults.faults(list(faults.FAULTS), folder, times=2),
    "deletions": saved_reports.deletions,
    "damages": lambda folder: saved_reports.damages(5_000, folder),
    "command-lines": lambda folder: command_lines.command_lines(1_600, folder),
    "scripts": lambda folder: scripts.scripts(list(scripts.SCRIPTS), folder),
    "secrets": lambda folder: secrets.scrubbed(),
    "growth": lambda folder: growth.growth(50, trial=False),
    "growth-with-trials": lambda folder: growth.growth(50, trial=True),
}


def main(arguments: list[str]) -> int:
    """Run the parts that are named, each for so many minutes at most; 1 when something failed."""
    parser = argparse.ArgumentParser(prog="python -m research.reliability")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="how long a part tries")
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    failed = False
    for name in asked.parts:
        count = tried(PARTS[name], asked.minutes)
        for each in count.failures:
            print(f"{name}: {each}", file=sys.stderr)
        failed |= bool(count.failures)
        write(count)
    return int(failed)


def tried(part: Part, minutes: float) -> Count:
    """What a part has tried at its end, or when its time is over."""
    Count.deadline = time.monotonic() + 60 * minutes
    try:
        with tempfile.TemporaryDirectory() as folder:
            return part(Path(folder))
    except Enough as enough:
        return enough.count
    finally:
        Count.deadline = math.inf


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
    """The commit that was run, marked where anything but this page has changed since."""
    git = ["git", "-C", str(PAGE.parent)]
    head = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, timeout=3600
    )
    words = [*git, "status", "--porcelain", "--", ":/", f":(exclude){PAGE.name}"]
    changed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=3600).stdout
    return head.stdout.strip() + (" and changes" if changed else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
