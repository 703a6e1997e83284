"""Names of layers fold into few sets, and the sets hold these names and no others."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8doctor.analysis.conversion import names_in_python

PARTS = st.sampled_from(["0", "1", "2", "10", "01", "007", "up", "1a", "a b", '"', "\\", "{", "}", "é", "\n"])


@pytest.mark.slow
@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), unique=True, max_size=12))
@example(["experts.00.up", "experts.01.up"])
@example(['of{"user"}.0.up', 'of{"user"}.1.up'])
def test_they_are_the_names_whatever_these_hold(names: list[str]) -> None:
    assert set().union(*map(eval, names_in_python(names))) == set(names)
