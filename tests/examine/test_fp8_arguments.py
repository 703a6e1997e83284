"""Which arguments of a script ask for FP8, and that nothing else of a command line is kept."""

from __future__ import annotations

import pytest

from fp8doctor.examine.fp8_support import fp8_arguments


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--fp8", ("--fp8",)),
        ("--depth=4 --fp8 --num-iterations=20", ("--fp8",)),
        ("--use_fp8 true", ("--use-fp8 true",)),
        ("--fp8=True", ("--fp8 true",)),
        ("--fp8 rowwise", ("--fp8 rowwise",)),
        ("--fp8 /home/me/data.bin", ("--fp8",)),
        ("--precision fp8", ("--precision fp8",)),
        ("--mixed_precision=fp8", ("--mixed-precision fp8",)),
        ("--trainer.precision=FP8", ("--precision fp8",)),
        ("training.precision=fp8", ("precision fp8",)),
        ("--model.converters float8", ("--converters float8",)),
        ("--fp8-format hybrid", ("--fp8-format hybrid",)),
        ("--no-fp8", ()),
        ("--fp8 --no-fp8", ()),
        ("--fp8=false", ()),
        ("--fp8 0", ()),
        ("--use-fp8 no", ()),
        ("--precision bf16", ()),
        ("--mixed_precision bf16", ()),
        ("--kv-cache-dtype fp8", ()),
        ("--dtype fp8", ()),
        ("--fp8-kv-cache", ()),
        ("--eval-fp8", ()),
        ("--token fp8 fp8", ()),
        ("", ()),
    ],
)
def test_what_asks_for_fp8(line: str, found: tuple[str, ...]) -> None:
    assert fp8_arguments(line.split()) == found


def test_nothing_of_the_user_is_kept() -> None:
    told = fp8_arguments(
        ["--fp8", "hf_secret", "--precision=fp8", "--hub-token=hf_secret", "--fp8=hf_secret"]
    )
    assert "secret" not in "".join(told)
