"""The detector tests under every supported torch: ``python -m research.versions.torch_matrix FOLDER``

Makes a virtual environment for each version under FOLDER (several GB each, about two minutes), installs torch
and the newest other libraries that go with it, runs the detector tests in it, and writes torch_matrix.md
beside this file. An environment that is there already is used again. What a version lacks is skipped with the
reason, which the table shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".md")

TORCHES = {
    "2.6.0": ("torchao==0.9.0", "peft==0.18.1"),
    "2.9.1": ("torchao==0.17.0", "peft==0.18.1"),
    "2.13.0": ("torchao", "peft"),
    "2.15.0": ("torchao", "peft"),
}
"""torch -> a torchao whose FP8 training runs with it, tried one by one, and a peft that takes it.

torchao 0.18 does not import under torch 2.6, and not all of it under 2.9. From 0.19.0 on peft refuses a
torchao before 0.16 with an ImportError (``TORCHAO_MINIMUM_VERSION`` in ``peft/import_utils.py``); 0.18.1
takes 0.4 and later, up to 0.17.
"""

OTHERS = ("transformers", "accelerate")
NEEDED = (
    "msgspec",
    "click",
    "tabulate",
    "jinja2",
    "packaging",
    "nvidia-ml-py",
    "pytest",
    "pytest-xdist",
    "hypothesis",
    "jsonschema",
)
SHOWN = ("torch", "torchao", "peft", *OTHERS, "numpy")

MESSAGE = 140
"""Characters of an error, or of the reason of a skip, that the table shows."""

DETECTORS = ("tests/examine", "tests/stacks", "tests/checks")
"""Tests that make real objects and look at them; a trial is not among them."""


def python_of(folder: Path, torch: str) -> Path:
    """The interpreter of a version's environment, which is made when it is not there."""
    home = folder / f"torch-{torch}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={torch}"], check=True, timeout=3600)
        subprocess.run(
            [*install, f"torch=={torch}", *TORCHES[torch], *OTHERS, *NEEDED], check=True, timeout=3600
        )
    return python


def versions(python: Path) -> dict[str, str]:
    """Installed versions of what the table shows; a dash for what is not installed."""
    code = (
        "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n try: print(n, m.version(n))\n except "
        "m.PackageNotFoundError: print(n, '-')"
    )
    said = subprocess.run(
        [python, "-c", code, *SHOWN], check=True, capture_output=True, text=True, timeout=3600
    ).stdout
    return dict(line.split() for line in said.splitlines())


def test(python: Path, results: Path) -> None:
    command: list[str | Path] = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "auto",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
        *DETECTORS,
    ]
    subprocess.run(command, cwd=ROOT, check=False, timeout=3600)


def counted(results: Path) -> tuple[dict[str, int | str], Counter[str], Counter[str]]:
    """Tests passed, failed and skipped and when, how often each error made one fail, and how often each
    reason skipped one."""
    root = ElementTree.parse(results).getroot()
    cases = list(root.iter("testcase"))
    failed = [
        each
        for case in cases
        if (each := case.find("failure")) is not None or (each := case.find("error")) is not None
    ]
    skipped = [each for case in cases if (each := case.find("skipped")) is not None]
    counts = {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
    }
    return {**counts, "on": root[0].attrib["timestamp"][:10]}, messages(failed), messages(skipped)


def messages(outcomes: list[ElementTree.Element]) -> Counter[str]:
    return Counter((each.get("message") or "no message").split("\n")[0][:MESSAGE] for each in outcomes)


def listed(title: str, of: list[tuple[str, Counter[str]]]) -> str:
    """A table of how often each message was seen with each torch; nothing when there is none."""
    rows = [
        f"| {torch} | {count} | `{text.replace('|', chr(92) + '|')}` |"
        for torch, counts in of
        for text, count in counts.most_common()
    ]
    return "\n".join(("", title, "", "| torch | tests | said |", "|---|---|---|", *rows, "")) if rows else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    help_of_only = "versions of torch to test; the others keep the rows of their last run in FOLDER"
    parser.add_argument("--only", nargs="*", default=list(TORCHES), choices=list(TORCHES), help=help_of_only)
    arguments = parser.parse_args()
    rows, errors, skips = [], [], []
    for torch in TORCHES:
        python, results = (
            arguments.folder / f"torch-{torch}" / "bin" / "python",
            arguments.folder / f"torch-{torch}.xml",
        )
        if torch in arguments.only:
            test(python_of(arguments.folder, torch), results)
        elif not results.exists():
            continue
        counts, raised, skipped = counted(results)
        rows.append({**versions(python), **counts})
        errors.append((torch, raised))
        skips.append((torch, skipped))
    made = f"Python {sys.version.split()[0]}, no GPU. Written by `python -m research.versions.torch_matrix`."
    made += (
        "\nTorch 2.6 has no FP8 GEMM for a CPU; in the tests of the checks `tests/stand_ins/scaled_mm.py` "
        "stands in for it there."
    )
    text = (
        "# The detector tests under other versions of "
        f"torch\n\n{made}\n\n{tabulate(rows, headers='keys', tablefmt='github')}\n"
    )
    text += listed("What failed, by the first line of the error:", errors) + listed(
        "What was skipped, and why:", skips
    )
    TABLE.write_text(text, encoding="utf-8")
    print(text)
    return any(raised for _, raised in errors)


if __name__ == "__main__":
    sys.exit(main())
