"""Names of layers fold into few sets, and the sets hold these names and no others."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fp8doctor.analysis.module_names import names_in_python

BLOCKS = [f"layers.{i}.{each}" for i in range(4) for each in ("q", "mlp.up")]
STAGES = [
    f"stages.{stage}.blocks.{block}.mlp.{each}"
    for stage, depth in enumerate((3, 3, 27, 3))
    for block in range(depth)
    for each in ("fc1", "fc2")
]
EXPERTS = [
    f"layers.{i}.experts.{expert}.{each}" for i in range(2) for expert in range(8) for each in ("w1", "w2")
]


@pytest.mark.parametrize(
    ("names", "most"),
    [
        (BLOCKS, 70),
        ([*BLOCKS, "head"], 80),
        (STAGES, 360),
        (EXPERTS, 200),
        (["a", "b"], 20),
        (["1", "3.2.up", "3.4.up"], 40),
        ([f"{i}.{each}" for i in range(8) for each in ("up", "down")], 70),
    ],
    ids=[
        "blocks",
        "blocks and a head",
        "blocks in stages",
        "experts",
        "no numbers",
        "gaps",
        "blocks of a Sequential",
    ],
)
def test_they_are_the_names_and_short(names: list[str], most: int) -> None:
    sets = names_in_python(names)
    assert set().union(*map(eval, sets)) == set(names)
    assert sum(map(len, sets)) <= most


PARTS = st.sampled_from(["0", "1", "2", "10", "01", "007", "up", "1a", "a b", '"', "\\", "{", "}", "é", "\n"])


@pytest.mark.slow
@given(st.lists(st.lists(PARTS, min_size=1, max_size=4).map(".".join), unique=True, max_size=12))
@example(["experts.00.up", "experts.01.up"])
@example(['of{"user"}.0.up', 'of{"user"}.1.up'])
def test_they_are_the_names_whatever_these_hold(names: list[str]) -> None:
    assert set().union(*map(eval, names_in_python(names))) == set(names)
