"""The detector tests under every supported torch: ``python -m tests.versions.torch_matrix FOLDER``

Makes a virtual environment for each version under FOLDER (several GB each, about two minutes), installs torch and the
newest other libraries that go with it, runs the detector tests in it, and writes torch_matrix.md beside this file. An
environment that is there already is used again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".md")

TORCHES = {"2.6.0": ("torchao==0.9.0",), "2.9.1": ("torchao==0.17.0",), "2.13.0": ("torchao",), "2.15.0": ("torchao",)}
"""torch -> a torchao whose FP8 training runs with it, tried one by one: 0.18 does not import under torch 2.6, and not all of it under 2.9."""

OTHERS = ("transformers", "accelerate", "peft")
NEEDED = ("msgspec", "click", "tabulate", "tqdm", "jinja2", "packaging", "nvidia-ml-py", "pytest", "hypothesis", "jsonschema")
SHOWN = ("torch", "torchao", *OTHERS, "numpy")

MESSAGE = 140
"""Characters of an error that the table shows."""

DETECTORS = ("tests/examine", "tests/stacks", "tests/checks")
"""Tests that make real objects and look at them; a trial is not among them."""


def python_of(folder: Path, torch: str) -> Path:
    """The interpreter of a version's environment, which is made when it is not there."""
    home = folder / f"torch-{torch}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={torch}"], check=True)
        subprocess.run([*install, f"torch=={torch}", *TORCHES[torch], *OTHERS, *NEEDED], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Installed versions of what the table shows; a dash for what is not installed."""
    code = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n try: print(n, m.version(n))\n except m.PackageNotFoundError: print(n, '-')"
    said = subprocess.run([python, "-c", code, *SHOWN], check=True, capture_output=True, text=True).stdout
    return dict(line.split() for line in said.splitlines())


def tested(python: Path, results: Path) -> tuple[dict[str, int], Counter[str]]:
    """Tests passed, failed and skipped, and how often each error made one fail."""
    command: list[str | Path] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *DETECTORS]
    subprocess.run(command, cwd=ROOT, check=False)
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    failed = [each for case in cases if (each := case.find("failure")) is not None or (each := case.find("error")) is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    errors = Counter((each.get("message") or "no message").split("\n")[0][:MESSAGE] for each in failed)
    return {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}, errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=list(TORCHES), choices=list(TORCHES), help="versions of torch")
    arguments = parser.parse_args()
    rows, errors = [], []
    for torch in arguments.only:
        python = python_of(arguments.folder, torch)
        counts, raised = tested(python, arguments.folder / f"torch-{torch}.xml")
        rows.append({**versions(python), **counts})
        errors += [f"| {torch} | {count} | `{text.replace('|', chr(92) + '|')}` |" for text, count in raised.most_common()]
    made = f"Python {sys.version.split()[0]}, no GPU, {datetime.now(UTC):%Y-%m-%d}. Written by `python -m tests.versions.torch_matrix`."
    text = f"# The detector tests under other versions of torch\n\n{made}\n\n{tabulate(rows, headers='keys', tablefmt='github')}\n"
    if errors:
        text += "\n".join(("\nWhat failed, by the first line of the error:\n", "| torch | tests | error |", "|---|---|---|", *errors, ""))
    TABLE.write_text(text, encoding="utf-8")
    print(text)
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
