"""Recognize common messages of FP8 jobs: cause, what to do, versions, source."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fp8doctor.code_snippets import with_imports

LONGEST = 1_000_000
"""Longest text to search, in characters from its end: a fatal error comes last."""

LONGEST_QUOTE = 100
"""Longest message to repeat in a command, in characters."""

KINDS = ("raised", "generic", "class", "follows", "logged")
"""Kinds of messages, the most relevant first.

``generic``: many causes, and the fix is a command that narrows them; only ``explain`` shows these.
``class``: the last exception says what is wrong in words that many libraries use; only if none else is known.
``follows``: another error usually caused it.
"""

LONGEST_EXCEPTION = 2000
"""Longest text in which a class is looked for, in characters from the last exception on."""

PLACE = re.compile(r"\{(\w+)(?:\|([^{}]*))?\}")
"""A place in cause and lines for what the pattern's group of this name found, or for what is behind ``|``."""

FOLDER = Path(__file__).with_name("messages")
"""Tables of the messages, one file for each library."""

WORDS_END = 500
"""Characters that stay of each end of a long word: a pattern may read to its end from each character."""

LONG_WORD = re.compile(rf"(?<!\S)(\S{{{WORDS_END}}})\S+(\S{{{WORDS_END}}})")

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

PREFIX = re.compile(
    r"^[ \t]*(?:(?:\[\w{0,12}\d\]:|\d{1,5}:|\([^()\n]{0,60}\bpid=\d+[^()\n]{0,20}\)|\[\d{1,6}/\d{1,6}\]"
    r"|[A-Z]\d{4} [\d:.]{1,20} \d+ [^]\n]{1,200}\]|(?:INFO|WARNING|ERROR) [^]\n]{1,80}\]|E(?= {3}))[ \t]?)+"
    r"|^.*\d%\|[^|\n]*\|.*",
    re.MULTILINE,
)
"""What torchrun, Ray, Slurm, torch's logger, vLLM and pytest put before a line; a line of tqdm."""

EXCEPTION = re.compile(
    r"^[ \t]*(?!.{0,80}(?:ChildFailed|CalledProcess))[\w.]*(?:Error|Exception)(?::|$)", re.M
)
"""The beginning of an exception, except one that only tells of another process's."""

OF_AN_ERROR = re.compile(
    r"error|exception|assert|fail|killed|\b(must|expect|unable|can ?not|unsupported|not)\b", re.I
)
"""Words of a message that names no exception."""

FRAME = re.compile(r'\bFile "[^"\n]{0,300}-packages[/\\](\w+)[/\\.]')
"""A frame of a traceback in an installed package."""


class KnownError(NamedTuple):
    """A message that a library raises or logs in FP8 jobs."""

    library: str
    says: str
    """The message, with ... for the variable parts."""
    pattern: str
    """Regular expression for the text with all whitespace normalized to single blanks."""
    cause: str
    lines: str
    """The fix, as lines to write."""
    versions: str
    source: str
    """File and version that contain the text, or the cause of the message."""
    codes: tuple[str, ...] = ()
    """Checks that find the cause in advance."""
    kind: str = KINDS[0]
    probed: str = ""
    """``no: why`` if no release was asked for the text, as `research.versions.probed` does."""

    def filled(self, names: Mapping[str, str]) -> KnownError:
        """Write names into its places; places without a name get their default, or dots."""
        cause, lines = (
            PLACE.sub(lambda place: names.get(place[1]) or place[2] or "...", text)
            for text in (self.cause, self.lines)
        )
        return self._replace(cause=cause, lines=lines)


@functools.cache
def known_errors() -> tuple[KnownError, ...]:
    """Read all messages, in the order of their libraries' files."""
    found = []
    for file in sorted(FOLDER.glob("*.toml")):
        table = tomllib.loads(file.read_text("utf-8"))
        for each in table.pop("error"):
            row = {"codes": (), **table, **each}
            row |= {"lines": with_imports(row["lines"]), "codes": tuple(row["codes"])}
            found.append(KnownError(**row))
    return tuple(found)


def recognise(text: str) -> tuple[KnownError, ...]:
    """Find the known messages in a text or log, the most relevant first, without generic ones.

    Errors stand before messages that follow from another and before warnings; of each, the last first.
    """
    return tuple(error for error in recognise_all(text) if error.kind not in ("generic", "class"))


def recognise_all(text: str) -> tuple[KnownError, ...]:
    """Find the known messages in a text or log; generic ones only if no other explains the same words."""
    return tuple(error for error, *_ in _found(text))


def fatal_is_known(text: str) -> bool:
    """Return whether the last exception in a text is a known one, or there is none."""
    begins, _ = _last_exception(clean(text), with_code=False)
    return begins == 0 or any(end > begins for _, end in _found(text))


def _last_exception(cleaned: str, *, with_code: bool = True) -> tuple[int, str]:
    """Return where the last exception, or the line of code that raised it, begins, and the text from there.

    A text without one is returned whole if it reads like a message, else nothing.
    """
    raised = max((match.start() for match in EXCEPTION.finditer(cleaned)), default=None)
    if raised is None:
        return 0, " ".join(cleaned.split()) if OF_AN_ERROR.search(cleaned) and "?" not in cleaned else ""
    begins = max(cleaned.rfind("\n", 0, max(raised - 1, 0)), 0) if with_code else raised
    return len(" ".join(cleaned[:begins].split())), " ".join(cleaned[begins:].split())


@functools.lru_cache(maxsize=1)
def _found(text: str) -> list[tuple[KnownError, int]]:
    """Find each known message and where its last occurrence ends."""
    cleaned = clean(text)
    text = " ".join(cleaned.split())
    packages = FRAME.findall(cleaned)
    library = {"library": packages[-1]} if packages else {}

    def filled(error: KnownError, match: re.Match[str]) -> KnownError:
        """Write what a match found, and the package whose file raised, into the places of a message."""
        names = {key.rstrip("0123456789"): found for key, found in match.groupdict().items() if found}
        return error.filled(library | names)

    known = [error for error in known_errors() if error.kind != "class"]
    last = {error: match for error in known for match in re.finditer(error.pattern, text)}
    named = [each.span() for error, each in last.items() if error.kind != "generic"]
    found = [
        (filled(error, match), match.end())
        for error, match in last.items()
        if not any(_is_of(span, match, error) for span in named)
    ]
    found.sort(key=lambda each: (KINDS.index(each[0].kind), -each[1]))
    begins, told = _last_exception(cleaned)
    raised = bool(found) and found[0][0].kind in KINDS[:2]
    if not raised and len(told) <= LONGEST_EXCEPTION and all(end <= begins for _, end in found):
        for error in known_errors():
            if error.kind == "class" and (match := re.search(error.pattern, told)):
                return [(filled(error, match), len(cleaned)), *found]
    return found


def _is_of(named: tuple[int, int], match: re.Match[str], error: KnownError) -> bool:
    """Return whether another message, found at ``named``, has these words; of a generic one, some of them."""
    start, end = named
    if error.kind == "generic":
        return match.start() < end and start < match.end()
    return start < match.start() and match.end() <= end


def clean(text: str) -> str:
    """Return the end of a text without colours, prefixes of lines, progress bars, and long words' middles."""
    lines = PREFIX.sub("", COLOUR.sub("", text[-LONGEST:]).replace("\r", "\n"))
    return LONG_WORD.sub(r"\1 \2", lines)


def in_a_sentence(text: str) -> str | None:
    """Explain the most relevant known message in a text, and name its page; None without one."""
    for error in recognise(text)[:1]:
        *_, words = re.finditer(error.pattern, " ".join(clean(text).split()))
        quoted = shlex.quote(words.group()) if len(words.group()) <= LONGEST_QUOTE else "< train.log"
        return f"{error.cause} More: fp8doctor explain {next(iter(error.codes), quoted)}"
    return None
