"""The pages of ``docs/errors/``: ``python -m tests.error_pages`` writes them from `fp8doctor.known_errors`,
`tests.test_pages` compares.

A page has the messages of one library, each under a heading that a search engine can find.
"""

import re
from itertools import groupby
from pathlib import Path

from fp8doctor.known_errors import KINDS, KnownError, known_errors
from tests.check_pages import fenced, prose, write
from tests.markdown import table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "errors"

INDEX = """# Error messages of FP8 training

{count} messages that libraries raise or log in FP8 jobs, each with its cause, fix, versions and source.
`fp8doctor explain < train.log` finds them in a log. `python -m tests.error_pages` writes this folder from
`fp8doctor/messages/`.

"""

HEAD = """# {library}: error messages in FP8 training

To find the message that stopped a job in its whole log, run `fp8doctor explain < train.log`.
"""


def pages() -> dict[str, str]:
    """Every file of the folder, by its name."""
    libraries = {name: list(found) for name, found in groupby(known_errors(), lambda each: each.library)}
    return {"README.md": index(libraries)} | {
        f"{file_name(library)}.md": page(library, found) for library, found in libraries.items()
    }


def file_name(library: str) -> str:
    return re.sub(r"\W+", "-", library.lower())


def index(libraries: dict[str, list[KnownError]]) -> str:
    rows = ((f"[{name}]({file_name(name)}.md)", str(len(found))) for name, found in libraries.items())
    return INDEX.format(count=len(known_errors())) + table(("library", "messages"), rows)


def page(library: str, errors: list[KnownError]) -> str:
    """Write the messages of one library, errors before warnings."""
    ordered = sorted(errors, key=lambda each: KINDS.index(each.kind))
    return "\n".join((HEAD.format(library=library), *map(entry, (each.filled({}) for each in ordered))))


def entry(error: KnownError) -> str:
    checks = ", ".join(f"[{code}](../checks/{code}.md)" for code in error.codes)
    found = f"Found in advance by {checks}.\n" if checks else ""
    return "\n".join(
        (
            f"## {prose(error.says)}\n",
            f"{prose(error.cause)}\n",
            f"{fenced(error.lines)}\n",
            f"Versions: {prose(error.versions)}. Source: {prose(error.source)}.\n{found}",
        )
    )


def main() -> None:
    write(pages(), FOLDER)


if __name__ == "__main__":
    main()
