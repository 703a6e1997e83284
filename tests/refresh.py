"""Write every generated file again: ``python -m tests.refresh [NAME...]``.

Nothing changes if the code and the pages agree. Read the diff before you commit it.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

WRITERS = {
    "schema": "tests.schema",
    "error_pages": "tests.error_pages",
    "readme": "tests.readme",
    "recordings": "tests.recordings",
    "recipes": "research.recipes.replay",
    "complaints": "research.complaints.replay",
    "unseen": "research.complaints.unseen",
    "unseen_engines": "research.complaints.unseen_engines",
    "unseen_mixed": "research.complaints.unseen_mixed",
    "unseen_more": "research.complaints.unseen_more",
    "unseen_last": "research.complaints.unseen_last",
    "unseen_late": "research.complaints.unseen_late",
    "unseen_next": "research.complaints.unseen_next",
    "check_pages": "tests.check_pages",
    "sentences": "tests.sentences",
    "screens": "pytest -q -p no:cacheprovider tests/render tests/test_gate.py",
}
"""What ``python -m`` runs to write each kind of file. Files that need a GPU or another torch are left out."""

LONGEST_S = 1800.0
"""Seconds that one writer may take; the slowest takes about 120."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refresh", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(WRITERS)}")
    names = parser.parse_args().names or list(WRITERS)
    if unknown := set(names) - set(WRITERS):
        parser.error(f"no such files: {', '.join(sorted(unknown))}")
    failed = [name for name in names if not written(name)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


def written(name: str) -> bool:
    """Run the writer of these files. Return whether it succeeded."""
    begun = time.monotonic()
    command = [sys.executable, "-m", *WRITERS[name].split()]
    env = os.environ | {"UPDATE_GOLDEN": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=False, timeout=LONGEST_S)
    print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
