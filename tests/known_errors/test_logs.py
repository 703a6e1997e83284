"""Whole logs: the message that stopped the job comes first, however a launcher prints it."""

import shlex
from collections.abc import Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

from fp8doctor.known_errors import (
    WORDS_END,
    clean,
    fatal_is_known,
    in_a_sentence,
    known_errors,
    recognise,
    recognise_all,
)

STEPS = "".join(
    f"\r{step // 60:3d}%|{'#' * (step // 600):10}| {step}/6000 [00:{step % 60:02d}<01:30, 9.1it/s, loss=2.31]"
    for step in range(6000)
)
"""A progress bar, which never ends its line."""

WARNINGS = (
    "WARNING: Supported flash-attn versions are >= 2.1.1, < 2.8.4. Found flash-attn 2.9.0.\n",
    "W1122 torch._dynamo hit config.recompile_limit (8)\n",
)

FATAL = (
    "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (16x41).\n"
)

SUMMARY = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "============================================================\ntrain.py FAILED\n"
)


def says(log: str) -> list[str]:
    return [each.says[:17] for each in recognise(log)]


@pytest.mark.parametrize("before", [True, False])
def test_an_error_stands_before_warnings(before: bool) -> None:
    log = "".join((*WARNINGS, STEPS, "\n", FATAL)) if before else "".join((FATAL, *WARNINGS, STEPS))
    assert says(log)[0] == "Expected trailing"
    assert set(says(log)[1:]) == {"Supported flash-a", "torch._dynamo hit"}
    assert str(in_a_sentence(log)).startswith("A size of an FP8 matmul")


def test_of_two_errors_the_last_stands_first() -> None:
    other = "RuntimeError: Multiplication of two Float8_e5m2 matrices is not supported\n"
    assert says(other + FATAL) == ["Expected trailing", "Multiplication of"]
    assert says(other + FATAL + other) == ["Multiplication of", "Expected trailing"]


def test_a_sentence_ends_with_the_command_that_explains_it() -> None:
    told = in_a_sentence("RuntimeError: mat2 must be col_major, got stride (20, 1)")
    assert str(told).endswith("More: fp8doctor explain 'mat2 must be col_major, got stride'")
    assert says(shlex.split(str(told))[-1]) == ["mat2 must be col_"]


def test_a_generic_answer_stands_behind_one_that_names_the_cause() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    log = FATAL + oom + WARNINGS[0]
    assert [each.kind for each in recognise_all(log)] == ["raised", "generic", "logged"]
    assert fatal_is_known(log)
    assert says(oom) == []
    assert in_a_sentence(oom) is None


def test_a_generic_answer_is_left_out_if_another_explains_the_same_words() -> None:
    (known,) = recognise_all("RuntimeError: expected scalar type Float but found Float8_e8m0fnu")
    assert known.kind == "raised"


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank0]: ",
        "[rank13]:[rank13]: ",
        "[default0]:",
        "7: [rank7]: ",
        "(head, rank=0, pid=3915) [rank3]: ",
        "(VllmWorkerProcess pid=271258) ERROR 02-10 18:13:32 multiproc_worker_utils.py:242] ",
        "E0116 02:56:28.832000 875267 site-packages/torch/_subclasses/fake_tensor.py:2891] [0/0] ",
        "\x1b[36m(RayActor pid=71, ip=10.0.0.1)\x1b[0m ",
        "E   ",
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_prefixes_colours_and_line_ends_do_not_hide_a_message(prefix: str, end: str) -> None:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/somebody/train.py", line 3, in <module>',
        "\x1b[31mRuntimeError\x1b[0m: Expected trailing dimension of mat1 to be divisible",
        "by 16 but got mat1 shape: (16x41).",
    )
    log = STEPS + end + "".join(f"{prefix}{line}{end}" for line in lines) + SUMMARY
    assert says(log) == ["Expected trailing"]
    assert fatal_is_known(log)


def test_an_unknown_last_exception_is_told_from_a_known_one() -> None:
    unknown = "Traceback (most recent call last):\n  raise KeyError(name)\nKeyError: 'layers.3.weight'\n"
    assert not fatal_is_known(FATAL + unknown)
    assert not fatal_is_known("".join(WARNINGS) + "[rank1]: " + unknown + SUMMARY)
    assert fatal_is_known(unknown + FATAL)
    assert fatal_is_known("".join(WARNINGS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    ["1%|", "1", "a.", "[rank0]:", "(pid=1", "W1122 1 1 ", "Error", "\x1b[", "ERROR ", "\n", " \n"],
)
def test_hostile_lines_are_cleaned_in_bounded_time(word: str) -> None:
    assert recognise(word * (900_000 // len(word))) == ()


def unbounded(pattern: Any) -> Iterator[Any]:
    """What a parsed pattern repeats without a limit."""
    for operator, argument in pattern:
        if operator in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            yield from [argument[2]] if argument[1] == _constants.MAXREPEAT else []
        arguments = argument if isinstance(argument, (tuple, list)) else (argument,)
        for each in (part for held in arguments for part in (held if isinstance(held, list) else (held,))):
            yield from unbounded(each) if isinstance(each, _parser.SubPattern) else ()


def test_no_pattern_reads_further_than_a_word_without_a_limit() -> None:
    """Words are cut, so a repeat of one character that is no blank ends. All other repeats have a limit: the
    time grows with the text."""
    assert list(unbounded(_parser.parse(r"a(b|(?:c.+)){2}(?!\d*)")))
    for error in known_errors():
        for repeated in unbounded(_parser.parse(error.pattern)):
            assert len(repeated) == 1, error.pattern
            assert not _compiler.compile(repeated).fullmatch(" "), error.pattern


def test_a_long_word_is_cut_and_hides_nothing() -> None:
    long = "1" * 5 * WORDS_END
    log = f"{long}{FATAL.strip()}{long} {long}"
    assert max(map(len, clean(log).split())) <= WORDS_END
    assert recognise(log) == recognise(FATAL)
