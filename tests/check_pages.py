"""The pages of ``docs/checks/``: ``python -m tests.check_pages`` writes them from the checks themselves,
`tests.test_pages` compares.

A page is the docstring of the check's file as Markdown; the index counts how often each was right.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8doctor import registry
from fp8doctor.cli.explain import Heading, headings
from research.check_rates import rates
from tests.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "checks"

INDEX = """# The checks

{count} checks, in the order in which a report shows them. `fp8doctor list` prints this table, and
`fp8doctor explain CODE` prints one page. To write a check, see [checks/README.md](../../checks/README.md).
`python -m tests.check_pages` writes this folder.

"""

RATES = """
## How often they were right

*Fired* counts the jobs on which a check fired. It was *rightly* or *wrongly* if the job says what a report
must or must not find, if a thread's cause is known, or if someone judged it. It was *missed* if the job or
the thread expects it. On recipes, only warnings and errors count.

"""

SHELL = re.compile(
    r"(#|(accelerate|export|fp8doctor|nvidia-smi|pip|python|sudo|top|torchrun|unset|[A-Z0-9_]+=\S+)\s)"
)
"""How a line for a shell begins."""

LIST = re.compile(r"^([-+]|1[.)])(?=\s)|^(?=[-=]+$)", re.M)
"""What would begin a list, or underline a heading, in the middle of a paragraph."""

SPECIAL = re.compile(r"[*<\[\]~]|(?<![^\W_])_|_(?![^\W_])")
"""What Markdown would read as its own outside of code."""


def pages() -> dict[str, str]:
    """Every file of the folder, by its name."""
    catalogue = headings()
    codes = {check.code for check in catalogue}
    return {"README.md": index(catalogue)} | {f"{check.code}.md": page(check, codes) for check in catalogue}


def index(catalogue: Sequence[Heading]) -> str:
    rows = (
        (f"[{check.code}]({check.code}.md)", f"`{check.name}`", check.area, check.severity, check.title)
        for check in catalogue
    )
    head = ("code", "name", "area", "severity", "what it finds")
    listed = INDEX.format(count=len(catalogue)) + table(head, rows)
    return f"{listed}\n{RATES}{rates(each.code for each in catalogue)}"


def page(check: Heading, codes: Iterable[str]) -> str:
    """Write the manual page of one check."""
    title, _, text = check.page.partition("\n\n")
    names = " · ".join(f"`{each}`" for each in (check.name, *check.also))
    facts = f"{names} · {check.area} · {check.severity} · `fp8doctor explain {check.code}`"
    named = {rule.name: rule.code for rule in registry.discover()}
    causes_of = (
        cause for rule in registry.discover() if rule.code == check.code for cause in rule.explained_by
    )
    causes = sorted({named.get(cause, cause) for cause in causes_of} - {check.code})
    *others, last = causes or ("",)
    either = f"{', '.join(others)} or {last}" if others else last
    first = [linked(f"If a report also shows {either}, fix that first.", codes, check.code)] if causes else []
    sections = (section(paragraph, codes, check.code) for paragraph in text.split("\n\n"))
    return "\n\n".join((f"# {check.code}: {title}", facts, *sections, *first)) + "\n"


def section(paragraph: str, codes: Iterable[str], own: str) -> str:
    """Write a paragraph of a docstring: code is fenced."""
    if paragraph.startswith("    "):
        return fenced(textwrap.dedent(paragraph))
    paragraph = re.sub(r"\n(?=https://)", "\n\n", paragraph)
    return linked(prose(paragraph), codes, own)


def prose(text: str) -> str:
    """Write lines of text that Markdown shows as they are; addresses become links."""
    spans = re.split(r"(`[^`]*`|https?://[^\s,;)]*[^\s,;).])", text)
    told = (
        span
        if span.startswith("`")
        else f"<{span}>"
        if span.startswith("http")
        else SPECIAL.sub(r"\\\g<0>", span)
        for span in spans
    )
    return LIST.sub(r"\\\g<0>", "".join(told))


def linked(text: str, codes: Iterable[str], own: str) -> str:
    """Link the codes of other checks to their pages."""
    others = [code for code in codes if code != own]
    return re.sub(rf"\b({'|'.join(others)})\b", r"[\1](\1.md)", text)


def fenced(code: str) -> str:
    """Write a block of code in the language that it is in."""
    lines = code.strip("\n").split("\n")
    language = "python" if is_python(code) else "sh" if all(map(SHELL.match, lines)) else "text"
    return "\n".join((f"```{language}", *lines, "```"))


def is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def write(made: dict[str, str], folder: Path) -> None:
    """Write all pages of a folder, and remove those that no longer belong to it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, "utf-8")


def main() -> None:
    write(pages(), FOLDER)


if __name__ == "__main__":
    main()
