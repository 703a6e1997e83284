"""The file of FP8's health: appended, torn at any byte, continued after a restart."""

from pathlib import Path

import pytest

from fp8doctor.errors import UserError
from fp8doctor.health.record import (
    CastHealth,
    Header,
    HealthFile,
    HealthLayer,
    Sample,
    last_step,
    read_health,
)

LAYERS = (HealthLayer("up", "Float8Linear", "torchao", "tensorwise"),)


def sample(step: int) -> Sample:
    cast = CastHealth(sqnr_db=31.5, saturated_pct=0.0, flushed_pct=0.25, amax=1.5, non_finite=0)
    return Sample(step, 2.0, 1.0, ((cast, None, cast),))


def write(path: Path, start: int, *steps: int) -> None:
    file = HealthFile(path)
    file.append(Header("train.py", 10, start, LAYERS))
    for step in steps:
        file.append(sample(step))


def test_a_file_torn_at_any_byte_is_read_and_continued(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    write(whole, 0, 10, 20)
    text = whole.read_bytes()
    first = text.index(b"\n") + 1
    for end in (*range(first, len(text), 7), len(text)):
        torn.write_bytes(text[:end])
        seen = read_health(torn).steps
        assert seen == (10, 20)[: len(seen)]
        assert len(seen) >= text[first:end].count(b"\n")
        write(torn, 20, 30)
        assert read_health(torn).steps == (*seen, 30)


def test_a_restart_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "health"
    write(path, 0, 10, 20, 30)
    write(path, 15, 20, 30, 40)
    health = read_health(path)
    assert health.steps == (10, 20, 30, 40)
    assert [head.step for head, _ in health.samples] == [0, 15, 15, 15]
    assert len(health.series()["up", "gradient"]) == 4
    assert ("up", "weight") not in health.series()
    assert last_step(path) == 40


NEWER = '{"type":"job","format":9,"version":"9.0","script":"a.py","every":1,"step":0,"layers":[]}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"facts": {}}\n', "holds no health of a job"),
        (NEWER, r"written by fp8doctor 9\.0, newer"),
        (None, "cannot read"),
    ],
)
def test_other_files_are_refused_in_a_sentence(text: str | None, said: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    if text:
        other.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        read_health(other)
    with pytest.raises(UserError, match="cannot write"):
        HealthFile(tmp_path / "none" / "file")
