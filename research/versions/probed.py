"""Whether releases hold the texts that fp8doctor quotes: ``python -m research.versions.probed FOLDER``

Probes both ends of each row's versions: the first and the last release that it names, and those next to them.
It downloads wheels into FOLDER, about 250 MB. Transformer Engine's wheels lack its C++ code, so its tags are
read from a bare clone, ``FOLDER/transformer_engine.git``. If no release contradicts a row, probed.tsv next to
this file is written. The network is used here and in no test; `tests.test_probed` compares the table with the
rows. A row that no text can prove says so: ``probed = "no: why"``.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from packaging.version import Version

from fp8doctor.analysis.training_bugs import training_bugs
from fp8doctor.known_errors import known_errors

TABLE = Path(__file__).with_suffix(".tsv")

PACKAGES = {
    "Accelerate": "accelerate",
    "PEFT": "peft",
    "torchao": "torchao",
    "Transformers": "transformers",
    "Transformer Engine": "transformer_engine",
}
"""Library of a table of messages -> package to probe. The tables of the others say why they are not."""

SHORTEST, SHORTEST_NAME = 18, 25
"""Letters of the shortest text that is looked for, with and without a blank: fewer stand in many places."""

MAIN = "d0067d0"
"""Commit of Transformer Engine, August 2026, that rows call main."""

SPAN = re.compile(
    r"(?:(?P<first>\d[\d.]*)(?: \([^)]*\))? to |to )(?P<last>\d[\d.]*)"
    r"|(?P<since>\d[\d.]*)(?: on\b| and newer)"
    r"|(?P<until>\d[\d.]*) and older"
    r"|before (?P<before>\d[\d.]*)"
    r"|(?P<in>\d[\d.]*(?= *$|[;,]| included))"
)
"""The versions of a row, in words."""


class Row(NamedTuple):
    """A statement on releases."""

    name: str
    package: str
    versions: str
    texts: tuple[str, ...]
    """Present if one of them is."""
    probed: str
    """``no: why``; of a bug also ``in`` or ``fixed`` with the code that proves it."""


class Claim(NamedTuple):
    """A release, and whether a row says that it holds the text."""

    release: str
    holds: bool


LONGEST_S = 600.0
"""Longest that git or pip may take."""


def rows() -> list[Row]:
    """List the rows to probe: messages, and releases that train incorrectly."""
    messages = [
        Row(
            each.says,
            PACKAGES.get(each.library, each.library),
            each.versions,
            quoted(each.pattern),
            each.probed,
        )
        for each in known_errors()
    ]
    bugs = [
        Row(each.name, each.library, each.versions, (each.probed.partition(": ")[2],), each.probed)
        for each in training_bugs()
    ]
    return [*messages, *bugs]


def quoted(pattern: str) -> tuple[str, ...]:
    """Draw the longest literal text of each alternative from a pattern."""
    longest = (max(runs, key=len, default="") for runs in _alternatives(_parser.parse(pattern)))
    return tuple(each for each in longest if len(each) >= (SHORTEST if " " in each else SHORTEST_NAME))


def _alternatives(tree: Any) -> list[list[str]]:
    if len(tree) == 1 and str(tree[0][0]) == "BRANCH":
        return [_runs(each) for each in tree[0][1][1]]
    return [_runs(tree)]


def _runs(tree: Any) -> list[str]:
    runs = [""]
    for op, argument in tree:
        if str(op) == "LITERAL":
            runs[-1] += chr(argument)
        elif str(op) == "SUBPATTERN":
            runs += [*_runs(argument[3]), ""]
        elif str(op) == "BRANCH":
            runs += [*(run for each in argument[1] for run in _runs(each)), ""]
        else:
            runs.append("")
    return [each.strip() for each in runs]


def claims(row: Row, releases: list[Version]) -> list[Claim]:
    """List the releases at the ends of a row's versions, and those next to them."""
    if MAIN in row.versions:
        return [Claim(MAIN, "absent from" not in row.versions)]
    low, high, below = _span(row)
    inside = [
        each
        for each in releases
        if (not low or _series(each, low) >= Version(low))
        and (not high or _series(each, high) <= Version(high))
        and (not below or each < Version(below))
    ]
    after = [each for each in releases if each > inside[-1]][:1]
    if row.probed.startswith("fixed: "):
        return [Claim(str(each), each in after) for each in (inside[-1], *after)]
    if low and low == high:  # read in one release
        return [Claim(str(inside[-1]), True)]
    ends = dict.fromkeys((inside[0], inside[-1]) if low else (inside[-1],))
    known = not row.probed.startswith("in: ")  # what fixed a bug is known, and not what broke it
    before = [each for each in releases if known and each < inside[0]][-1:]
    return [Claim(str(each), each in ends) for each in (*before, *ends, *after)]


def _span(row: Row) -> tuple[str, str, str]:
    """Read the first and the last release that a row names, or the one after the last."""
    if row.versions[0] in "<>":
        low, below = (re.search(rf"{sign}([\d.]*\d)", row.versions) for sign in (">=", "<"))
        return low[1] if low else "", "", below[1] if below else ""
    found = SPAN.search(row.versions.split("; ")[0])
    assert found, f"{row.name}: {row.versions!r} names no versions; say why: probed"
    low_end = found["first"] or found["since"] or found["in"] or ""
    return low_end, found["last"] or found["until"] or found["in"] or "", found["before"] or ""


def _series(release: Version, of: str) -> Version:
    """Shorten a release to as many numbers as a row names: 1.15.2 is in 1.15."""
    return Version(".".join(map(str, release.release[: of.strip(".").count(".") + 1])))


CODE = (".py", ".cpp", ".cu", ".cuh", ".h", ".txt", ".cmake")
"""Ends of the names of files to read."""


@cache
def code_of(package: str, release: str, folder: Path) -> str:
    """Read all code of a release, with joined string literals and single blanks."""
    if package == "transformer_engine":
        tag = release if release == MAIN else _tags(folder)[Version(release)]
        command = ["git", "-C", str(folder / f"{package}.git"), "archive", "--format=zip", tag]
        data = subprocess.run(command, capture_output=True, check=True, timeout=LONGEST_S).stdout
        return _code(io.BytesIO(data), "")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    command += ["-d", str(folder), f"{package}=={release}"]
    if not list(folder.glob(f"{package}-{release}-*.whl")):
        subprocess.run(command, check=True, timeout=LONGEST_S)
    return _code(next(folder.glob(f"{package}-{release}-*.whl")), f"{package}/")


def _code(archive: Path | io.BytesIO, within: str) -> str:
    with zipfile.ZipFile(archive) as files:
        names = [each for each in files.namelist() if each.startswith(within) and each.endswith(CODE)]
        names = [each for each in names if not each.startswith(("tests/", "docs/"))]
        code = "\n".join(files.read(each).decode(errors="replace") for each in names)
    return " ".join(re.sub(r"""(["'])\s*[rfbu]{0,2}\1""", "", code.replace("\\", "")).split())


@cache
def _tags(folder: Path) -> dict[Version, str]:
    command = ["git", "-C", str(folder / "transformer_engine.git"), "tag"]
    names = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=LONGEST_S
    ).stdout.split()
    found = {Version(each.removeprefix("v")): each for each in names if re.fullmatch(r"v[\d.]+", each)}
    return {Version("2.19"): "release_v2.19"} | found  # a branch, as long as its tag is missing


@cache
def releases_of(package: str, folder: Path) -> list[Version]:
    """List the final releases of a package, oldest first."""
    if package == "transformer_engine":
        return sorted(_tags(folder))
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LONGEST_S).stdout
    names = re.search(r"Available versions: (.*)", told)
    assert names, told
    found = map(Version, names[1].split(", "))
    return sorted(each for each in found if not each.is_prerelease)


def probed(row: Row, folder: Path) -> Iterator[tuple[Claim, bool]]:
    """Compare each claim of a row with the release: the claim, and whether it is right."""
    for claim in claims(row, releases_of(row.package, folder)):
        code = code_of(row.package, claim.release, folder)
        yield claim, any(each in code for each in row.texts) == claim.holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.versions.probed", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    lines, wrong = [f"# probed on {datetime.now(UTC):%Y-%m-%d}: package, row, versions, in, not in"], 0
    for row in rows():
        if row.probed.startswith("no: "):
            continue
        found = list(probed(row, folder))
        for claim, right in found:
            wrong += not right
            if not right:
                print(row.package, claim.release, "lacks" if claim.holds else "has", row.texts, row.name)
        ends = [" ".join(each.release for each, _ in found if each.holds is holds) for holds in (True, False)]
        lines.append("\t".join((row.package, row.name, row.versions, *ends)))
    if not wrong:
        TABLE.write_text("\n".join(lines) + "\n", "utf-8")
    return bool(wrong)


def table() -> set[tuple[str, ...]]:
    """Read package, name and versions of each row that was probed."""
    lines = TABLE.read_text("utf-8").splitlines()[1:]
    return {tuple(line.split("\t")[:3]) for line in lines}


if __name__ == "__main__":
    sys.exit(main())
