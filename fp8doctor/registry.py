"""The catalogue: checks register themselves, are discovered, selected, and run without one taking down
another."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, recorded
from fp8doctor.finding import AREAS, Finding, NotApplicable, Outcome, Severity

CheckFunction = Callable[[Facts], Finding | NotApplicable | None]


@dataclass(frozen=True)
class Check:
    """One registered disease."""

    code: str
    name: str
    area: str
    severity: Severity
    needs: tuple[str, ...]
    """Dotted paths of the facts without which it cannot answer, such as ``network.linears.compiled``."""
    explained_by: tuple[str, ...]
    """Codes whose disease causes this one: when one of them is found, this one's treatment is not
    prescribed."""
    function: CheckFunction

    @property
    def module(self) -> ModuleType:
        return sys.modules[self.function.__module__]

    @property
    def page(self) -> str:
        """The manual page: the docstring of the check's file."""
        return inspect.cleandoc(self.module.__doc__ or "")

    @property
    def title(self) -> str:
        """The first line of the page."""
        return self.page.partition("\n")[0]


_checks: dict[str, Check] = {}


def check(
    code: str,
    name: str,
    *,
    area: str,
    severity: Severity,
    needs: Iterable[str],
    explained_by: Iterable[str] = (),
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check. Raises ValueError at import when the code or name is malformed or already taken."""

    def register(function: CheckFunction) -> CheckFunction:
        new = Check(code, name, area, severity, tuple(needs), tuple(explained_by), function)
        if not re.fullmatch(r"[A-Z]{3,5}\d{3}", code):
            raise ValueError(f"{code!r} is not a code: three to five capital letters and three digits")
        if area not in AREAS:
            raise ValueError(f"{code}: {area!r} is not an area; areas are {', '.join(AREAS)}")
        for other in _checks.values():
            if (
                other.code == code or other.name == name
            ) and other.function.__module__ != function.__module__:
                raise ValueError(
                    f"{code} {name} is already registered by {other.function.__module__} as "
                    f"{other.code} {other.name}"
                )
        _checks[code] = new
        return function

    return register


def discover(folders: Sequence[Path] = ()) -> tuple[Check, ...]:
    """All checks of the package, and those in ``folders``, by code within the order of `AREAS`.

    Raises `UserError` when a folder does not exist or one of its files cannot be imported.
    """
    package = importlib.import_module("fp8doctor.checks")
    for module in pkgutil.walk_packages(package.__path__, "fp8doctor.checks."):
        importlib.import_module(module.name)
    for folder in folders:
        _import_folder(folder)
    return tuple(sorted(_checks.values(), key=lambda each: (AREAS.index(each.area), each.code)))


def _import_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--checks {folder}: no such folder")
    for path in sorted(folder.rglob("*.py")):
        if path.name == "__init__.py":
            continue
        name = "fp8doctor_checks_" + re.sub(r"\W", "_", str(path.resolve().with_suffix("")))
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise UserError(f"--checks {path}: {type(error).__name__}: {error}") from error


def select(
    checks: Iterable[Check], selected: Sequence[str] = (), ignored: Sequence[str] = ()
) -> tuple[Check, ...]:
    """Checks whose code starts with one of ``selected`` (all when empty) and with none of ``ignored``.

    Raises `UserError` for a prefix that no check has.
    """
    checks = tuple(checks)
    for prefix in (*selected, *ignored):
        if not any(each.code.startswith(prefix) for each in checks):
            raise UserError(
                f"no check has a code that begins with {prefix!r}; 'fp8doctor list' shows them all"
            )
    return tuple(
        each
        for each in checks
        if (not selected or each.code.startswith(tuple(selected)))
        and not (ignored and each.code.startswith(tuple(ignored)))
    )


def run(checks: Iterable[Check], facts: Facts) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Findings and outcomes of every check. A check that raises is ``crashed`` and costs no other."""
    causes, findings, outcomes = {}, [], []
    for each in checks:
        causes[each.code] = each.explained_by
        answer = _answer(each, facts)
        if isinstance(answer, Finding):
            findings.append(answer)
            answer = Outcome(code=each.code, outcome="sick", area=each.area)
        outcomes.append(answer)
    found = {finding.code for finding in findings}
    explained = (
        msgspec.structs.replace(
            finding, caused_by=tuple(code for code in causes[finding.code] if code in found)
        )
        for finding in findings
    )
    return tuple(explained), tuple(outcomes)


def _answer(check: Check, facts: Facts) -> Finding | Outcome:
    """What one check says: its finding with what the registration knows of it, else the outcome."""
    missing = missing_fact(facts, check.needs)
    if missing:
        return Outcome(code=check.code, outcome="unknown", reason=missing, area=check.area)
    try:
        answer = check.function(facts)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Outcome(code=check.code, outcome="crashed", reason=reason, area=check.area)
    if isinstance(answer, Finding):
        severity = answer.severity or check.severity
        return msgspec.structs.replace(
            answer, code=check.code, name=check.name, area=check.area, severity=severity
        )
    if isinstance(answer, NotApplicable):
        return Outcome(code=check.code, outcome="not_applicable", reason=answer.reason, area=check.area)
    return Outcome(code=check.code, outcome="healthy", area=check.area)


def missing_fact(facts: Facts, needs: Iterable[str]) -> str | None:
    """Why a check cannot answer, or None: the first needed fact that was not recorded, with the reason if it
    is known."""
    gaps = dict(facts.gaps) if recorded(facts.gaps) else {}
    if recorded(facts.trial) and recorded(facts.trial.gaps):
        gaps |= facts.trial.gaps
    for path in needs:
        at = _first_gap(facts, path.split("."), 0)
        if at is not None:
            reason = next(
                (
                    text
                    for gap, text in gaps.items()
                    if path == gap or path.startswith(gap + ".") or gap.startswith(path + ".")
                ),
                None,
            )
            return f"{at}: {reason}" if reason else f"{at} was not recorded"
    return None


def _first_gap(value: Any, parts: list[str], depth: int) -> str | None:
    """The dotted path at which the walk along ``parts`` meets a fact that was not recorded, or None."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return next((gap for item in value if (gap := _first_gap(item, parts, depth))), None)
    if not recorded(value):
        return ".".join(parts[:depth])
    return None if depth == len(parts) else _first_gap(getattr(value, parts[depth]), parts, depth + 1)
