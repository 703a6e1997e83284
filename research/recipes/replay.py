"""Replay the corpus: ``python -m research.recipes.replay`` writes the tables of README.md, which
`test_replay` holds."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from fp8doctor.report import Report
from research.recipes import in_te, in_torchao, without_fp8
from research.recipes.judged import JUDGED, MENDED
from research.recipes.parts import Recipe
from tests.looked import looked
from tests.markdown import table
from tests.stand_ins import transformer_engine

HERE = Path(__file__).parent
PAGE = HERE / "README.md"
MARK = "## What was found\n"
RECIPES: tuple[Recipe, ...] = (*in_torchao.RECIPES, *in_te.RECIPES, *without_fp8.RECIPES)
KINDS = ("rightly", "false alarm", "not judged")
ALARMS = ("warning", "error")

LEGEND = """
`python -m research.recipes.replay` writes this section. A recipe's infos are listed, and not counted.
"""


@contextmanager
def surroundings(recipe: Recipe) -> Iterator[None]:
    """The variables that the recipe sets, and the stand-in that it names."""
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.dict(os.environ, dict(recipe.environment)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        if recipe.stand_in.startswith(in_te.STAND_IN):
            transformer_engine.install(patch)
        yield


def replayed(recipe: Recipe) -> Report:
    """The report on a rebuilt recipe."""
    with surroundings(recipe):
        return looked(recipe.build(), recipe.batch(), assume_gpu=recipe.gpu, autocast=recipe.autocast)


def codes(report: Report, *severities: str) -> list[str]:
    return sorted(each.code for each in report.findings if each.severity in severities)


def row(recipe: Recipe, report: Report) -> tuple[str, ...]:
    """What was found on one recipe, and how it was judged."""
    alarms = codes(report, *ALARMS)
    name = f"[{recipe.name}](https://github.com/{address(recipe)})"
    judged = (f"{code} {JUDGED[recipe.name, code][0]}" for code in alarms)
    return (
        name,
        recipe.gpu,
        "yes" if report.answer.has_fp8 or report.verdict.status == "fp8_not_engaged" else "no",
        ", ".join(judged) or "-",
        " ".join(codes(report, "info")) or "-",
    )


def address(recipe: Recipe) -> str:
    """Where the file lies, at the commit of README.md."""
    owner, name, *path = recipe.path.split("/")
    pinned = dict(
        line.strip("| \n").split(" | ")
        for line in PAGE.read_text("utf-8").splitlines()
        if line.startswith(f"| {owner}/{name} |")
    )
    return f"{owner}/{name}/blob/{pinned[f'{owner}/{name}']}/{'/'.join(path)}"


def section(rows: list[tuple[str, ...]]) -> str:
    """The findings recipe by recipe, by check, and why each was judged as it was."""
    by_check = Counter((code, judgment) for (_, code), (judgment, _) in JUDGED.items())
    fired = sorted({code for code, _ in by_check})
    checks = [(code, *(str(by_check[code, kind]) for kind in KINDS)) for code in fired]
    total = ("all", *(str(sum(by_check[code, kind] for code in fired)) for kind in KINDS))
    silent = sum(each[3] == "-" for each in rows)
    why = [(name, code, judgment, reason) for (name, code), (judgment, reason) in JUDGED.items()]
    return "\n".join(
        (
            f"{MARK}{LEGEND}",
            f"{len(rows)} recipes, of which {silent} raise no alarm.",
            "",
            table(("recipe", "GPU", "FP8 seen", "warnings and errors", "infos"), rows),
            table(("check", *KINDS), [*checks, total]),
            table(("recipe", "check", "judged", "why"), why),
            "Found false and mended, so that they are in no table above:",
            "",
            table(("recipe", "check", "what was false", "what was mended"), MENDED),
        )
    )


if __name__ == "__main__":
    reports = [replayed(each) for each in RECIPES]
    rule = PAGE.read_text("utf-8").partition(MARK)[0]
    rows = [row(recipe, report) for recipe, report in zip(RECIPES, reports, strict=True)]
    PAGE.write_text(rule + section(rows), encoding="utf-8")
