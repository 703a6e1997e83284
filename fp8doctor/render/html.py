"""A page as an HTML file, and as a fragment for a notebook, which has no script."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8doctor.render.page import FAMILIES, LOOKS, Page
from fp8doctor.render.terminal import printable

if TYPE_CHECKING:
    from jinja2 import Environment

LINE = "\x1e"
"""Stands for the end of a line within text until a template is filled, so that no text begins a line: a build
server would obey ``::error::``."""


def as_html(page: Page, *, template: str = "page.html.jinja") -> str:
    """Write a page, its folded details where a reader opens them."""
    values = {"page": page, "title": page.title or page.heading[0], "looks": LOOKS, "families": [*FAMILIES]}
    return _templates().get_template(template).render(values).lstrip().replace(LINE, "&#10;")


@functools.cache
def _templates() -> Environment:
    from base64 import b64encode
    from hashlib import sha256

    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The page's policy names this script by its hash: a browser runs no other.
    copy = made.get_template("copy.js.jinja").render()
    made.globals["copy_hash"] = f"sha256-{b64encode(sha256(copy.encode()).digest()).decode()}"
    return made


def _shown(value: Any) -> Any:
    """Replace control characters and lone surrogates in text, but not in markup."""
    if type(value) is not str:
        return value
    return LINE.join(map(printable, value.replace("\r\n", "\n").replace("\t", "    ").split("\n")))
