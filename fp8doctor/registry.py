"""The catalogue: checks register themselves, are discovered, selected, and run apart from each other."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from fp8doctor.areas import AREAS, SEVERITIES, Severity
from fp8doctor.check_folders import import_folder, import_offered, output_of
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Unrecorded, recorded
from fp8doctor.facts.paths import path_of
from fp8doctor.facts.record import from_builtins, to_builtins
from fp8doctor.finding import Finding, NotApplicable, Outcome
from fp8doctor.wording import error_in_words, escaped

CheckFunction = Callable[[Facts], Finding | NotApplicable | None]


class Check(msgspec.Struct, frozen=True):
    """One registered disease."""

    code: str
    name: str
    area: str
    severity: Severity
    explained_by: tuple[str, ...]
    """Codes whose disease causes this one, and which are treated in its place where they are found."""
    function: CheckFunction
    changes_fp8: bool = False
    """Its treatment changes how FP8 runs: before that nothing tells whether to give FP8 up."""
    invalidates_model: bool = False
    """With its disease a model of the step is no model of what runs: compiled in name only, layers that stay
    out of FP8 or cannot run in it, several GPUs. An uncompiled FP8 layer is what the model knows best."""
    stays_in_bf16: bool = False
    """Its disease is left where no layer trains in FP8."""
    about_shapes: bool = False
    """It proposes to keep layers in BF16 for their shapes alone, which timing the shapes may refute."""
    may_raise: bool = False
    """It can predict from the facts of a job that its step raises: while it is unknown, so is that. Not for a
    check of the GPU, which is unknown wherever there is none."""
    background: bool = False
    """It tells what holds of a healthy job too, and so comes after what other checks find."""

    @property
    def module(self) -> ModuleType:
        return sys.modules[self.function.__module__]

    @property
    def page(self) -> str:
        """The manual page: the docstring of the check's file, harmless to print."""
        return escaped(inspect.cleandoc(self.module.__doc__ or ""), keep="\n")

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
    explained_by: Iterable[str] = (),
    changes_fp8: bool = False,
    invalidates_model: bool = False,
    stays_in_bf16: bool = False,
    about_shapes: bool = False,
    may_raise: bool = False,
    background: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check. Raises ValueError at import when the code or name is malformed or already taken."""

    def register(function: CheckFunction) -> CheckFunction:
        causes = tuple(explained_by)
        flags = changes_fp8, invalidates_model, stays_in_bf16, about_shapes, may_raise, background
        new = Check(code, name, area, severity, causes, function, *flags)
        if not re.fullmatch(r"[A-Z]{3,5}\d{3}", str(code)):
            raise ValueError(f"{code!r} is not a code: three to five capital letters and three digits")
        if type(name) is not str or not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(f"{code}: {name!r} is not a name: words joined by hyphens")
        if severity not in SEVERITIES:
            raise ValueError(f"{code}: {severity!r} is not a severity; they are {', '.join(SEVERITIES)}")
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


@functools.cache
def _import_own() -> None:
    """Import every check of the package, and of installed packages that offer some, once in a process."""
    package = importlib.import_module("fp8doctor.checks")
    for module in pkgutil.walk_packages(package.__path__, "fp8doctor.checks."):
        importlib.import_module(module.name)
    import_offered()


def discover(folders: Sequence[Path] = ()) -> tuple[Check, ...]:
    """All checks of the package and of installed packages, and those in ``folders``, by code within the order
    of `AREAS`.

    Raises `UserError` when a folder does not exist, or one of its files or an installed package's checks
    cannot be imported; then none of its checks stays.
    """
    _import_own()
    known = dict(_checks)
    try:
        for folder in folders:
            import_folder(folder)
    except BaseException:
        _checks.clear()
        _checks.update(known)
        raise
    return tuple(sorted(_checks.values(), key=lambda each: (AREAS.index(each.area), each.code)))


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
    """Findings and outcomes of every check. One that reads a fact that was not recorded is ``unknown``; one
    that raises anything else is ``crashed``, and costs no other."""
    checks = tuple(checks)
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
    last = {each.code for each in checks if each.background}
    return tuple(sorted(explained, key=lambda finding: finding.code in last)), tuple(outcomes)


def _answer(check: Check, facts: Facts) -> Finding | Outcome:
    """What one check says: its finding with what the registration knows of it, else the outcome."""
    try:
        with output_of(check.function):
            answer = _well_formed(check.function(facts))
    except Unrecorded as missing:
        path = path_of(missing)
        reason = missing.reason or why_missing(facts, path)
        return Outcome(code=check.code, outcome="unknown", reason=reason, missing=path, area=check.area)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(code=check.code, outcome="crashed", reason=error_in_words(error), area=check.area)
    if isinstance(answer, Finding):
        severity = answer.severity or check.severity
        return msgspec.structs.replace(
            answer, code=check.code, name=check.name, area=check.area, severity=severity
        )
    if isinstance(answer, NotApplicable):
        return Outcome(code=check.code, outcome="not_applicable", reason=answer.reason, area=check.area)
    return Outcome(code=check.code, outcome="healthy", area=check.area)


def _well_formed(answer: Any) -> Finding | NotApplicable | None:
    """The answer of a check, when it can be shown and saved. Raises TypeError or `UnreadableDocument`."""
    if answer is None:
        return None
    if not isinstance(answer, Finding | NotApplicable):
        raise TypeError(f"it returned a {type(answer).__name__}, not a Finding, a NotApplicable or None")
    try:
        from_builtins(type(answer), to_builtins(answer))
    except TypeError as error:
        raise TypeError(f"its evidence cannot be saved: {error}") from error
    return answer


def why_missing(facts: Facts, path: str) -> str:
    """Which fact a check could not read, and the reason if it is known."""
    reason = gap_of(facts, path)
    return f"{path}: {reason}" if reason else f"{path} was not recorded"


def gap_of(facts: Facts, path: str) -> str | None:
    """Why a fact was not recorded: the reason of what is around it, else of a part of it."""
    gaps = dict(facts.gaps) if recorded(facts, "gaps") else {}
    if recorded(facts, "trial.gaps"):
        gaps |= facts.trial.gaps
    around = (text for gap, text in gaps.items() if gap == path or path.startswith(gap + "."))
    within = (text for gap, text in gaps.items() if gap.startswith(path + "."))
    return next(around, None) or next(within, None)
