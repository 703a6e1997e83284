"""What holds of every page and fragment, whatever it shows."""

import re
import xml.etree.ElementTree as ElementTree
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from xml.etree.ElementTree import Element

TAGS = set(
    "html head meta title style body main header footer div section article h1 h2 h3 h4 h5 p span strong "
    "dl dt dd ol ul li figure figcaption svg rect polyline table thead tbody tr th td pre code details "
    "summary caption".split()
)
"""Elements that are used; none of them loads or runs anything."""

ATTRIBUTES = set(
    "lang charset name content http-equiv class scope colspan role aria-label aria-hidden tabindex viewBox "
    "preserveAspectRatio x y width height points title".split()
)


def parsed(html: str) -> Element:
    """A page or a fragment, read as strictly as XML is: every element closed, every sign escaped."""
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>"))


def hold_sound(html: str) -> Element:
    """Hold a page or a fragment to what every reader and every browser needs; its root."""
    html.encode("utf-8")
    root = parsed(html)
    assert {each.tag for each in root.iter()} - {"script"} <= TAGS
    hold_to_its_policy(root)
    assert {name for each in root.iter() for name in each.attrib} <= ATTRIBUTES
    style = "".join(each.text or "" for each in root.iter("style"))
    assert not re.search(r"url\(|@import|http|expression|</", style)
    levels = headings(root)
    assert levels[0] in (1, 3)
    assert all(level <= before + 1 for before, level in pairwise(levels))
    assert all(each.get("scope") in ("col", "row", "rowgroup") for each in root.iter("th"))
    for each in root.iter("svg"):
        told = each.get("aria-hidden") == "true" or (each.get("role") == "img" and text(each.find("title")))
        assert told, "a chart without words"
    for each in root.iter("rect"):
        assert float(each.get("width", 0)) > 0
        assert -1 <= float(each.get("x", 0)) <= 1000
    for table in root.iter("table"):
        wide = [sum(int(cell.get("colspan", 1)) for cell in row) for row in table.iter("tr")]
        assert len(set(wide)) == 1, "rows of one table of unlike widths"
    return root


def hold_to_its_policy(root: Element) -> None:
    """A page runs the one script that its policy names by hash, and loads nothing; a fragment has none."""
    scripts = [each.text or "" for each in root.iter("script")]
    policies = [each.get("content") for each in root.iter("meta") if each.get("http-equiv")]
    assert len(scripts) == len(policies) == (root.tag == "html")
    for script, policy in zip(scripts, policies, strict=True):
        digest = b64encode(sha256(script.encode()).digest()).decode()
        assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        assert not re.search(r"fetch|XMLHttp|import|src|http|innerHTML|eval", script)


def headings(root: Element) -> list[int]:
    return [int(each.tag[1]) for each in root.iter() if re.fullmatch(r"h[1-6]", each.tag)]


def text(element: Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def rules(html: str) -> Iterator[tuple[str, str]]:
    """The rules of the style: selector and body, those within a media query beside it."""
    style = "".join(each.text or "" for each in parsed(html).iter("style"))
    for query, inside in re.findall(r"(@media[^{]*)\{((?:[^{}]*\{[^{}]*\})*)\s*\}", style):
        yield from ((f"{query.strip()} {selector.strip()}", body) for selector, body in _plain(inside))
    yield from (
        (s.strip(), body) for s, body in _plain(re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*\s*\}", "", style))
    )


def _plain(style: str) -> list[tuple[str, str]]:
    return re.findall(r"([^{}]+)\{([^{}]*)\}", style)


def variables(body: str) -> dict[str, str]:
    """The colours that a rule names."""
    return dict(re.findall(r"--(\w+):\s*(#[0-9a-f]{6})", body))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours. Source: WCAG 2.2, relative luminance."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
