"""Plant faults in the product and see which the tests notice: ``python -m research.mutants [NAME ...]``.

`mutants.toml` has each fault: a file, the text that it replaces, and the tests that should fail. The text
has to stand in the file exactly once, so a fault whose code moved is named and has to be written again. The
checkout stays as it is: faults are planted in a copy. Exits with 1 if fewer than ``--least`` are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.markdown import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "research" / "mutants.md"
LONGEST_S = 900
COLUMNS = ("fault", "file", "caught", "s")


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    select: str = ""
    """An expression for ``-k``."""


def mutants() -> list[Mutant]:
    found = tomllib.loads((ROOT / "research" / "mutants.toml").read_text("utf-8"))
    return [Mutant(name, **fault) for name, fault in found.items()]


def stale(mutant: Mutant) -> str | None:
    """Say why a fault cannot be planted any more."""
    if missing := [each for each in (mutant.file, *mutant.tests) if not (ROOT / each).exists()]:
        return f"there is no {missing[0]}"
    count = (ROOT / mutant.file).read_text("utf-8").count(mutant.old)
    return None if count == 1 else f"its text stands {count} times in {mutant.file}"


def fails(copy: Path, tests: list[str], select: str) -> bool:
    """Run tests until one fails. Raises RuntimeError if they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly"]
    command += [*(["-k", select] if select else []), *tests]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1, 2):  # 2: a module of the tests cannot be imported
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode != 0


def planted(mutant: Mutant, copy: Path) -> bool:
    """Return whether the tests notice the fault."""
    file = copy / mutant.file
    sound = file.read_text("utf-8")
    file.write_text(sound.replace(mutant.old, mutant.new), "utf-8")
    try:
        return fails(copy, mutant.tests, mutant.select)
    finally:
        file.write_text(sound, "utf-8")


def copied(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--least", type=int, default=0, help="how many have to be caught")
    parser.add_argument("--check", action="store_true", help="only say which cannot be planted any more")
    options = parser.parse_args()
    chosen = [each for each in mutants() if not options.names or each.name in options.names]
    lost = {each.name: why for each in chosen if (why := stale(each))}
    for name, why in lost.items():
        print(f"{name}: {why}")
    if options.check or lost:
        return bool(lost)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for mutant in chosen:
            begun = time.monotonic()
            caught = planted(mutant, copy)
            rows.append(
                (mutant.name, mutant.file, "yes" if caught else "no", f"{time.monotonic() - begun:.0f}")
            )
            print(*rows[-1], flush=True)
    count = sum(each[2] == "yes" for each in rows)
    print(f"{count} of {len(rows)} are caught")
    if not options.names:
        PAGE.write_text(
            f"# Faults planted\n\n{count} of {len(rows)} are caught.\n\n{table(COLUMNS, rows)}", "utf-8"
        )
    return int(count < options.least)


if __name__ == "__main__":
    sys.exit(main())
