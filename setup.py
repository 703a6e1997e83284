"""The packages, found: checks/ ships inside fp8doctor. And the page for a package index, which knows no files
beside it. Everything else is in setup.cfg.

``find:`` in setup.cfg cannot do it: it would ship checks/ under that very name. ``package_dir`` renames only
packages that are listed one by one, and a new area would be missing from such a list.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https://)([^)]*)\)")


def description(url: str | None) -> str:
    """Write README.md so that its links lead to the project's address; without one they are their words."""

    def link(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if url is None:
            return "" if picture else words
        return f"{picture}[{words}]({url}/{'raw' if picture else 'blob'}/main/{path})"

    return LINK.sub(link, (HERE / "README.md").read_text("utf-8"))


if __name__ == "__main__":
    metadata = ConfigParser()
    metadata.read(HERE / "setup.cfg", "utf-8")
    setup(
        long_description=description(metadata.get("metadata", "url", fallback=None)),
        packages=[
            *find_packages(include=["fp8doctor", "fp8doctor.*"]),
            "fp8doctor.checks",
            *(f"fp8doctor.checks.{area}" for area in find_packages("checks")),
        ],
    )
