"""The heads of the checks as they are read from files are those that the registry knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8doctor import registry
from fp8doctor.headings import Heading, _heading, headings
from fp8doctor.registry import discover, rules_of

UNREADABLE = """\"\"\"A disease of a computed name.\"\"\"
from fp8doctor.registry import check
NAME = "computed"
@check("XYZ001", NAME, area="step", severity="info")
def computed(facts):
    return None
"""


def of_registry(*folders: Path) -> tuple[Heading, ...]:
    codes = dict.fromkeys(each.code for each in discover(folders))
    return tuple(_heading(rules_of(code)) for code in codes)


def test_what_is_read_from_files_is_what_is_registered() -> None:
    assert headings() == of_registry()


def test_checks_of_a_folder_are_asked_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))
    (tmp_path / "computed.py").write_text(UNREADABLE)
    found = headings((tmp_path,))
    assert found == of_registry(tmp_path)
    assert "computed" in [each.name for each in found]
