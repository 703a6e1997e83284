"""Saved reports with damage: each is read and shown, or refused in one sentence."""

from __future__ import annotations

import copy
import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

from fp8doctor import load_report
from fp8doctor.answer.layer_rows import layer_report, named
from fp8doctor.cli.options import FORMATS
from fp8doctor.diagnosis.document import Document
from fp8doctor.diagnosis.two_reports import compared, regression
from fp8doctor.errors import UserError
from fp8doctor.render.command_pages import compare_page, why_page
from research.reliability.count import Count
from tests.recordings import text_of
from tests.render.every_format import in_format

RECORDED = Path(__file__).parents[2] / "tests" / "patients" / "recorded"

RECORDINGS = (
    *("h200-wide_head", "h200-mlp", "h200-fsdp2_float8"),
    *("h200-lora_fp32", "h200-te_without_autocast", "h200-moe"),
)
"""Small ones of different kinds; of the first, shapes were timed GEMM by GEMM, and modules profiled."""

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63),
    10**400,
    0.0,
    -0.5,
    1e-300,
    1e300,
    "",
    "ß\u202e\x1b[31m",
    "x" * 5_000,
    [],
    {},
    [[]],
    {"": None},
    [None, None],
)
"""What stands in the place of a value."""

Path_ = tuple[Any, ...]

REMOVED = object()


def places(value: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Where a document can be damaged: every key and every index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*above, key)
        yield from places(inner, (*above, key))


def kinds(value: Any) -> dict[Path_, Path_]:
    """One place of each kind: elements of a list are alike."""
    found: dict[Path_, Path_] = {}
    for place in places(value):
        found.setdefault(tuple("[]" if isinstance(key, int) else key for key in place), place)
    return found


def deeds(value: Any) -> list[tuple[str, Any]]:
    """What can become of a value, each with its name; of a list its length and order too."""
    lists = (
        (("shorter", value[:-1]), ("doubled", value * 2), ("backwards", value[::-1]))
        if type(value) is list
        else ()
    )
    return [*lists, *((f"becomes {str(odd)[:12]!r} ({type(odd).__name__})", odd) for odd in ODD)]


def held(document: Any, place: Path_) -> Any:
    """What stands at a place."""
    return reduce(operator.getitem, place, document)


def changed(document: Any, place: Path_, value: Any = REMOVED) -> Any:
    """The document with another value at this place, or without it."""
    document = copy.deepcopy(document)
    holder = held(document, place[:-1])
    if value is REMOVED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return document


def torn(saved: str, how: random.Random) -> tuple[str, bytes]:
    """The text cut off, or with some bytes changed."""
    raw = bytearray(saved.encode())
    at = how.randrange(len(raw))
    if how.random() < 0.5:
        return f"cut off at {at}", bytes(raw[:at])
    raw[at : at + how.randrange(1, 9)] = how.randbytes(how.randrange(9))
    return f"bytes at {at}", bytes(raw)


def pages(report: Document, other: Document) -> dict[str, Callable[[], Iterable[str]]]:
    """Every page that can be made of a saved report, by its name; some lay another one beside it."""

    def compare() -> Iterator[str]:
        for pair in ((report, other), (other, report), (report, report)):
            found = compared(*pair, ("first.json", "second.json"))
            yield from (found.to_json(), compare_page(found, pair))

    def baseline() -> Iterator[str]:
        for one, another in ((report, other), (other, report)):
            yield regression(one.facts, another.facts, "saved.json", 5) or "no regression"

    def why() -> Iterator[str]:
        with suppress(UserError):
            first = next(iter(report.facts.linears()), None)
            found = layer_report(named(first.get("name", "") if first else "", report.facts), report)
            yield from (found.to_json(), why_page(found, report.facts))

    def written(format: str, **how: bool) -> Callable[[], Iterable[str]]:
        return lambda: [in_format(report, format, **how)]

    return {
        **{format: written(format) for format in FORMATS},
        "text -q": written("text", quiet=True),
        "text -v": written("text", verbose=True),
        "compare": compare,
        "--baseline": baseline,
        "why": why,
    }


def look_at(path: Path, why: list[str], other: Document | None = None) -> None:
    """Read and show what is saved there, also beside ``other``; ``why`` takes what is wrong."""
    try:
        report = load_report(path)
    except UserError as refused:
        if "\n" in str(refused) or len(str(refused)) > 400:
            why.append(f"refused in more than a sentence: {refused}")
        return
    why += [f"{each.code} crashed: {each.reason}" for each in report.outcomes if each.outcome == "crashed"]
    for name, page in pages(report, other or report).items():
        try:
            if not all(page()):
                why.append(f"nothing is shown as {name}")
        except Exception as error:
            why.append(f"{name}: {type(error).__name__}: {error}")
    again = report.to_json()
    path.write_text(again, encoding="utf-8")
    if load_report(path).to_json() != again:
        why.append("it is not read back as it was written")


def recorded() -> dict[str, Any]:
    return {name: json.loads(text_of(RECORDED / f"{name}.json.gz")) for name in RECORDINGS}


def deletions(folder: Path, most: int = 10_000) -> Count:
    """Each key of each kind deleted once, from every recording."""
    count, path = Count("a saved report with a key deleted"), folder / "damaged.json"
    whole = load_report(RECORDED / f"{RECORDINGS[-2]}.json.gz")  # with a trial
    for name, document in recorded().items():
        for place in list(kinds(document).values())[:most]:
            path.write_text(json.dumps(changed(document, place)))
            with count.attempt(f"{name} without {'.'.join(map(str, place))}") as why:
                look_at(path, why, whole)
    return count


def damages(tries: int, folder: Path, seed: int = 0) -> Count:
    """So many reports in which a value is another, or that are torn: one in eight."""
    count, how = Count("a saved report with a value changed, or torn"), random.Random(seed)
    path, documents = folder / "damaged.json", recorded()
    ways = [
        (name, place, deed, value)
        for name, document in documents.items()
        for place in kinds(document).values()
        for deed, value in deeds(held(document, place))
    ]
    for name, place, deed, value in how.sample(ways, min(tries - tries // 8, len(ways))):
        path.write_text(json.dumps(changed(documents[name], place, value)))
        with count.attempt(f"{name}: {'.'.join(map(str, place))} {deed}") as why:
            look_at(path, why)
    for _ in range(tries // 8):
        name = how.choice(RECORDINGS)
        what, raw = torn(json.dumps(documents[name]), how)
        path.write_bytes(raw)
        with count.attempt(f"{name}: {what}") as why:
            look_at(path, why)
    return count
