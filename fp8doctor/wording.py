"""Counts, shares and exceptions in words, escaped for a terminal."""

from collections.abc import Iterable

MESSAGE_LENGTH = 300
"""Characters of a user's exception that fit into a sentence; details hold more."""


def error_in_words(error: BaseException) -> str:
    """Format an exception in one line, scrubbed and escaped for a terminal."""
    text = " ".join(_message(error).split())
    text = text if len(text) <= MESSAGE_LENGTH else text[:MESSAGE_LENGTH] + " ..."
    return escaped(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def sentence(error: BaseException) -> str:
    """Return the first line of an exception, scrubbed."""
    first = _message(error).strip().partition("\n")[0][:MESSAGE_LENGTH]
    return f"{type(error).__name__}: {first}".rstrip(": ")


def _message(error: BaseException) -> str:
    try:
        from fp8doctor.facts.scrub import scrub

        return scrub(str(error))
    except Exception:
        import logging

        logging.getLogger("fp8doctor").debug("a message cannot be shown", exc_info=True)
        return "(its message cannot be shown)"


def escaped(text: str, keep: str = "") -> str:
    """Escape characters that could control a terminal or break a line; others may replace them instead."""
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )


def quoted(text: str) -> str:
    """Quote a message from a file in one escaped line; a long one loses its middle."""
    text = " ".join(text.split())
    if len(text) > MESSAGE_LENGTH:
        text = f"{text[: MESSAGE_LENGTH // 2]} ... {text[-MESSAGE_LENGTH // 2 :]}"
    return escaped(text)


def part_of(some: int, count: int, noun: str) -> str:
    """Write a part of a count, which stands once if that is the whole: all 16 blocks, 8 of 16 blocks."""
    return f"all {plural(count, noun)}" if 1 < some == count else f"{some} of {plural(count, noun)}"


def percent(share: float) -> str:
    """Write a share in per cent, with a digit more if it is small: 86%, 2.3%, 0.04%."""
    if 0 < share < 0.01:
        return "< 0.01%"
    return f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"


def in_ms(ms: float | None) -> str:
    """Format a time: 92.5 ms, 7,119.9 ms."""
    return "an unknown time" if ms is None else f"{ms:,.1f} ms"


def rounded_ms(ms: float) -> str:
    """Write an estimate's size in ms: whole, below 10 with a tenth."""
    return f"{abs(ms):,.0f}" if abs(ms) >= 9.95 else f"{abs(ms):,.1f}"


def quotient(one_ms: float | None, other_ms: float | None) -> float | None:
    """Divide two times as `in_ms` shows them, so a reader can check; None for 0.0."""
    one, other = round(one_ms or 0.0, 1), round(other_ms or 0.0, 1)
    return one / other if one and other else None


def minus(one_ms: float | None, other_ms: float | None) -> float:
    """Subtract two times as `in_ms` shows them, in ms."""
    return round(one_ms or 0.0, 1) - round(other_ms or 0.0, 1)


def times(one_ms: float | None, other_ms: float | None) -> str:
    found = quotient(one_ms, other_ms)
    return "unknown" if found is None else f"{found:.2f}x"


def in_times(ratio: float) -> str:
    """Tell how many times slower or faster a step is: 1.15x, 5.1x."""
    return f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 block, 24 blocks, 2 batches."""
    ending = "es" if noun.endswith(("s", "x", "sh", "tch", "nch")) else "s"
    return f"{count} {noun}{'' if count == 1 else ending}"


LONGEST_LABEL = 24
"""Longest file name that labels a file in sentences, in characters."""


def labels(first: str, second: str) -> tuple[str, str]:
    """Label two files: by name if the names are short and differ, else by path."""
    short = first != second and max(len(first), len(second)) <= LONGEST_LABEL
    return (first, second) if short else ("the first", "the second")


def capital(text: str) -> str:
    """Capitalize a sentence unless its first word may be a file's name."""
    return f"T{text[1:]}" if text.startswith("the ") else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ask for the nearest known name; empty if none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name[:200], [*known], 1)
    return f"; did you mean {escaped(near[0])}?" if near else ""
