"""Check another interpreter for the child: that of the environment with the user's torch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

from fp8doctor.errors import UserError
from fp8doctor.facts.scrub import scrub
from fp8doctor.wording import quoted

OLDEST = (3, 11)
"""Oldest Python that fp8doctor runs in, as in setup.cfg."""

NEEDED = ("packaging", "msgspec", "pynvml")
"""Packages that the child imports besides torch; if the other environment lacks one, it borrows this
one's."""

COMPILED = ("msgspec",)
"""Packages among `NEEDED` that are built for one version of Python."""

LONGEST_S = 60.0
"""Seconds that the other interpreter may take to answer."""

_ASK = f"""\
import importlib.util, json, sys
found = [name for name in {(*NEEDED, "torch")!r} if importlib.util.find_spec(name)]
print(json.dumps([list(sys.version_info[:2]), sys.implementation.name, found]))
"""


def checked_interpreter(python: str) -> dict[str, str]:
    """Check another interpreter; return the packages that it borrows, with their files.

    Raises `UserError` if it cannot run the child.
    """
    version, implementation, found = _answer(python)
    name = scrub(python)
    if version < OLDEST:
        raise UserError(
            f"--python {name} is Python {_dotted(version)}, and fp8doctor needs {_dotted(OLDEST)} or newer"
        )
    if "torch" not in found:
        raise UserError(f"--python {name} has no torch; name the interpreter of the environment you train in")
    lacking = [each for each in NEEDED if each not in found]
    same = (version, implementation) == (sys.version_info[:2], sys.implementation.name)
    if not same and (built := [each for each in lacking if each in COMPILED]):
        raise UserError(
            f"--python {name} is Python {_dotted(version)} and this one {_dotted(sys.version_info[:2])}, so "
            f"that it cannot borrow {', '.join(built)}; install it there: {name} -m pip install "
            f"{' '.join(built)}"
        )
    specs = {each: importlib.util.find_spec(each) for each in lacking}
    return {each: spec.origin for each, spec in specs.items() if spec and spec.origin}


def _answer(python: str) -> tuple[tuple[int, int], str, list[str]]:
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
        answer: Any = json.loads(done.stdout)
        (major, minor), implementation, found = answer
    except OSError as error:
        raise UserError(f"--python {scrub(python)} cannot be started: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"--python {scrub(python)} did not answer within {LONGEST_S:g} s") from None
    except (ValueError, TypeError):
        said = quoted(scrub(done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"))
        raise UserError(f"--python {scrub(python)} does not answer as a Python does: {said}") from None
    return (major, minor), implementation, found


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
