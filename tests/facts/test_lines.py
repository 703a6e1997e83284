"""Lines that arrive in chunks are whole again, and no chunk is copied again for each that follows."""

from __future__ import annotations

import random

from fp8doctor.facts.record import Lines


def test_chunks_of_any_length_give_the_same_lines() -> None:
    whole = b"".join(b"%d" % number * (number % 7) + b"\n" for number in range(300)) + b"torn"
    for longest in (1, 2, 5, 50, 5000):
        lines, found, at, random_ = Lines(), [], 0, random.Random(longest)
        while at < len(whole):
            size = random_.randint(1, longest)
            found += lines.add(whole[at : at + size])
            at += size
        assert found == whole.split(b"\n")[:-1]


class Chunk(bytes):
    """A chunk that counts the bytes of what it is appended to."""

    before = 0

    def __radd__(self, rest: bytes) -> Chunk:
        Chunk.before += len(rest)
        return Chunk(bytes(rest) + bytes(self))


def test_a_long_line_is_put_together_once() -> None:
    lines = Lines()
    assert not any(lines.add(Chunk(b"a" * 100)) for _ in range(100))
    assert lines.add(b"\n") == [b"a" * 10_000]
    assert Chunk.before <= 10_000
