"""Docstrings keep to the style: a short first line that says what the thing does, in the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.not_said import docstrings, not_said

ROOT = Path(__file__).resolve().parents[1] / "fp8doctor"

PACKAGES = ("examine", "integrations", "loading", "profiling", "running", "stacks")
"""Packages whose docstrings are in the style already."""

HEADLESS = re.compile(r"(Whether|What|Who|Those that|That)\b")


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_in_the_style(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for text in docstrings(path):
            assert not_said(text) == [], path.name
            assert not HEADLESS.match(text), f"{path.name}: {text}"
            first, *rest = text.split("\n\n")
            assert "\n" not in first or not rest, f"{path.name}: {first}"
