"""The documentation site: ``python -m sphinx -W --keep-going -b html -c docs . site`` (extra ``docs``).

Its source is the whole checkout: pages link to each other, to recordings and to results as they do there. A
link that leads nowhere is a warning, and -W makes warnings errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

project = "fp8doctor"
author = "The fp8doctor developers"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "checks/README.md",
    "examples/*.md",
    "tests/**.md",
    "research/**.md",
]
myst_heading_anchors = 4
suppress_warnings = ["myst.header", "toc.not_included", "misc.highlighting_failure"]
html_theme = "furo"
html_title = "fp8doctor"
html_theme_options = {"top_of_page_buttons": []}

HOME = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>fp8doctor</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"></head>
<body><main><h1><a href="docs/index.html">fp8doctor</a></h1></main></body></html>
"""


def with_navigation(app: Any, name: str, source: list[str]) -> None:
    """Give the sidebar the lists of docs/index.md, and every page of a folder to its README.md."""
    if name == root_doc:
        for title, links in re.findall(r"^## (.*)\n\n((?:- .*\n)+)", source[0], re.M):
            pages = re.findall(r"\]\(([^)]*)\)", links)
            source[0] += "\n```{toctree}\n:hidden:\n:caption: " + "\n".join([title, "", *pages]) + "\n```\n"
    elif name in ("docs/checks/README", "docs/errors/README"):
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


ACCESSIBLE = (
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ("<pre>", '<pre tabindex="0">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    ('<th class="head"><p></p></th>', "<td></td>"),
    ('<div id="search-results"></div>', '<h1>Search</h1><div id="search-results"></div>'),
)
"""What Sphinx and the theme write, and what screen readers and keyboards need."""


def accessible(page: str) -> str:
    """Return a page with the attributes that a screen reader or a keyboard needs."""
    for found, needed in ACCESSIBLE:
        page = page.replace(found, needed)
    return page


def with_start(app: Any, error: Exception | None) -> None:
    """Lead the site's root to the home page, and write llms.txt with the site's links."""
    if error is None and app.builder.name == "html":
        for page in Path(app.outdir).rglob("*.html"):
            page.write_text(accessible(page.read_text("utf-8")), "utf-8")
        site, listed = Path(app.outdir), Path(app.srcdir, "llms.txt").read_text("utf-8")
        (site / "index.html").write_text(HOME, "utf-8")
        (site / "llms.txt").write_text(listed.replace(".md)", ".html)"), "utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", with_navigation)
    app.connect("build-finished", with_start)
