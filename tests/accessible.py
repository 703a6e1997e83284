"""Rules of accessibility that a machine can check in HTML: ``python -m tests.accessible FOLDER``.

axe-core and its like need a browser; these are the rules of theirs that our pages can break.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

VOID = set("area base br col embed hr img input link meta source track wbr".split())
NAMED = ("a", "button", "th", "title", "summary", "h1", "h2", "h3", "h4", "h5", "h6")
"""Elements that mean nothing without text."""

Attributes = dict[str, str | None]


class _Page(HTMLParser):
    """Collect the faults of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, Attributes, list[str]]] = []
        self.faults: list[str] = []
        self.levels: list[int] = []
        self.labelled: set[str | None] = set()
        self.inputs: list[Attributes] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = dict(given)
        self.tags |= {tag, attributes.get("role") or tag}
        self.faults += _faults(tag, attributes)
        if tag == "label":
            self.labelled.add(attributes.get("for"))
        if tag in ("input", "select", "textarea") and attributes.get("type") != "hidden":
            self.inputs.append(attributes)
        if tag == "img":  # its alternative is part of the text around it
            self.handle_data(attributes.get("alt") or "")
        if tag not in VOID:
            self.open.append((tag, attributes, []))

    def handle_data(self, data: str) -> None:
        for _, _, texts in self.open:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self.open:
            name, attributes, texts = self.open.pop()
            text = "".join(texts).strip()
            if name in NAMED and not (text or attributes.get("aria-label") or attributes.get("aria-hidden")):
                self.faults.append(f"<{name}> without text")
            if name[0] == "h" and name[1:].isdecimal():
                self.levels.append(int(name[1:]))
            if name == tag:
                return

    def all_faults(self) -> Iterator[str]:
        yield from self.faults
        yield from (f"no <{tag}>" for tag in ("title", "main", "h1") if tag not in self.tags)
        if self.levels.count(1) > 1:
            yield "more than one <h1>"
        for before, level in zip([0, *self.levels], self.levels, strict=False):
            if level > before + 1:
                yield f"<h{level}> after <h{before}>"
        for each in self.inputs:
            if not (each.get("aria-label") or each.get("title") or each.get("id") in self.labelled):
                yield f"<input> without a label: {each}"


def _faults(tag: str, attributes: Attributes) -> Iterator[str]:
    if tag == "html" and not attributes.get("lang"):
        yield "<html> without lang"
    if tag == "img" and "alt" not in attributes:
        yield f"<img> without alt: {attributes.get('src')}"
    if attributes.get("role") == "heading" and not attributes.get("aria-level"):
        yield "a heading by its role without aria-level"
    scrolls = tag == "pre" or {"scroll", "table-wrapper"} & {*(attributes.get("class") or "").split()}
    if scrolls and attributes.get("tabindex") != "0":
        yield f"<{tag}> that no keyboard can scroll"
    if (attributes.get("tabindex") or "0").lstrip("-") not in ("0", "1") or attributes.get("tabindex") == "1":
        yield "a tabindex that changes the order"
    if tag == "meta" and attributes.get("name") == "viewport" and "user-scalable=no" in str(attributes):
        yield "a page that cannot be zoomed"


def faults(html: str) -> list[str]:
    """List what is wrong with a page."""
    page = _Page()
    page.feed(html)
    page.close()
    return [*page.all_faults()]


def main(folder: Path) -> int:
    """Print the faults of all pages below a folder; the exit code."""
    pages = sorted(folder.rglob("*.html"))
    found = {page: wrong for page in pages if (wrong := faults(page.read_text("utf-8")))}
    for page, wrong in found.items():
        print(page, *dict.fromkeys(wrong), sep="\n    ")
    print(f"{len(pages)} pages, {len(found)} with faults")
    return int(bool(found) or not pages)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
