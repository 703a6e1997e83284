"""Kinds of messages: a sentence that many libraries use, answered with the names that the log gives."""

from pathlib import Path

import pytest

from fp8doctor.known_errors import PLACE, KnownError, known_errors, recognise, recognise_all

FRAMES = """Traceback (most recent call last):
  File "/home/somebody/train.py", line 8, in <module>
    main()
  File "/venv/lib/python3.12/site-packages/somefp8/recipes.py", line 41, in make
    raise ValueError(name)
"""


def only(text: str) -> KnownError:
    (found,) = recognise_all(text)
    return found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ValueError: Unknown recipe 'rowwise_v2'", "somefp8 does not know this recipe: rowwise_v2."),
        ("AssertionError: the number of rows must be a multiple of 32", "no multiple of 32"),
        ("RuntimeError: MXFP8 needs compute capability 10.0", "(compute capability 10.0)"),
    ],
)
def test_an_unknown_exception_is_told_by_its_own_words(text: str, told: str) -> None:
    found = only(f"{FRAMES}{text}\n")
    assert found.kind == "class"
    assert told in found.cause
    assert not PLACE.search(f"{found.cause}{found.lines}")
    assert recognise(text) == (), "screens name causes, not kinds"


@pytest.mark.parametrize(
    "text",
    [
        "Is FP8 only supported on Hopper and does it need compute capability 9.0?",
        "pad to multiples of 16",
        "FP8 training of a 7B model on H100",
        "ZeroDivisionError: division by zero",
        "KeyError: 'train'",
        "IndexError: list index out of range",
        "TritonMissing: Either the package is not installed or it is too old.",
        "AttributeError: 'NoneType' object has no attribute 'dtype'",
        "ncclInvalidArgument: Invalid value for an argument. Last error: FP8 reduction begins with sm90",
        "MXFP8 block scaling is not available on HPU.",
        "ValueError: too many values to unpack (expected 2)",
        "FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'",
        "ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "AssertionError: loss is nan",
        "StopIteration",
        "KeyboardInterrupt",
        "PermissionError: [Errno 13] Permission denied: '/checkpoints'",
        "RuntimeError: DataLoader worker (pid 1234) exited unexpectedly",
        "torch.cuda.CudaError: the launch timed out",
    ],
)
def test_other_texts_are_of_no_kind(text: str) -> None:
    assert [each.kind for each in recognise_all(text) if each.kind == "class"] == []


def test_a_kind_is_told_of_the_last_exception_alone() -> None:
    handled = (
        "ValueError: Unknown recipe 'a'\n\nDuring handling of the above exception, another occurred:\n\n"
    )
    assert recognise_all(f"{handled}IndexError: list index out of range\n") == ()
    known = "RuntimeError: mat2 shape (32x20) must be divisible by 16\n"
    assert [each.kind for each in recognise_all(known)] == ["raised"], "a message of the table comes first"
    warned = "WARNING: Supported flash-attn versions are >= 2.1.1, < 2.8.4. Found flash-attn 2.9.0.\n"
    found = recognise_all(f"{warned}{FRAMES}ValueError: Unknown recipe 'b'\n")
    assert [each.kind for each in found] == ["class", "logged"]


def test_a_healthy_log_has_no_kind() -> None:
    log = Path(__file__).with_name("healthy.log").read_text("utf-8")
    lines = log.splitlines()
    for begin in range(0, len(lines), 5):
        assert recognise_all("\n".join(lines[begin : begin + 5])) == ()


def test_each_place_is_a_group_or_has_a_default() -> None:
    for error in known_errors():
        for place in PLACE.finditer(f"{error.cause} {error.lines}"):
            named = f"(?P<{place[1]}" in error.pattern or place[1] == "library"
            assert named, (error.says, place[0])
            assert place[2] or place[1] != "library", (error.says, place[0])
