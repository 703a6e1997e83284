"""The table of releases that do not work: what `incompatible-versions` says of them is tested there."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from fp8doctor.analysis.training_bugs import TrainingBug, training_bugs


@pytest.mark.parametrize("bug", training_bugs(), ids=lambda bug: bug.name)
def test_each_row_has_a_source_and_a_release_that_is_not_affected(bug: TrainingBug) -> None:
    assert bug.when or bug.job
    assert bug.sources
    assert all(each.startswith("https://") for each in bug.sources)
    assert bug.effect.endswith(".")
    for fixed in re.findall(rf"{bug.library}>=([\d.]+)\"", bug.lines):
        assert fixed not in SpecifierSet(bug.versions)
