"""The catalog: checks register, are discovered and selected, and run in isolation."""

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec.structs import replace

from fp8doctor.areas import AREAS, RETIRED, SEVERITIES, Severity
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Unrecorded, from_builtins, path_of, recorded, to_builtins
from fp8doctor.finding import Finding, NotApplicable, Outcome
from fp8doctor.wording import error_in_words, escaped

GRAVEST_FIRST = ("fires", "crashed", "unknown", "silent", "not_applicable", "refuted")
"""Which outcome a code has whose rules answer differently."""

OWN, PREFIX = "fp8doctor.checks.", "fp8doctor_checks_"
"""How the modules of our own checks are named, and those of a folder's files."""

NO_FP8 = NotApplicable(reason="no layer trains in FP8")

CheckFunction = Callable[[Facts], Finding | NotApplicable | None]


class Check(msgspec.Struct, frozen=True):
    """One registered rule. Rules of one file share its code, its page and its outcome."""

    code: str
    name: str
    """Names the exact cause; a finding has it too."""
    area: str
    severity: Severity
    explained_by: tuple[str, ...]
    """Codes or names of checks that cause this issue; if found, they are treated instead."""
    function: CheckFunction
    was: tuple[str, ...] = ()
    """Codes that it had as checks of their own, still valid in --select, --ignore and explain."""
    changes_fp8: bool = False
    """The fix changes how FP8 runs: before that, nothing shows whether to give FP8 up."""
    invalidates_model: bool = False
    """The cost model does not apply to a job with this issue.

    Examples: compiled in name only, layers that stay out of FP8 or cannot run in it, several GPUs. An
    uncompiled FP8 layer is the model's best known case.
    """
    stays_in_bf16: bool = False
    """Turning FP8 off does not fix it."""
    needs_fp8: bool = False
    """It does not apply to a model without a layer that trains in FP8."""

    @property
    def module(self) -> ModuleType:
        """Return the check's file, or its folder if it has several files."""
        return sys.modules[_home(self.function)]

    @property
    def page(self) -> str:
        """Return the check's page: the docstring of its module, safe to print."""
        return escaped(inspect.cleandoc(self.module.__doc__ or ""), keep="\n")


_checks: dict[str, Check] = {}


def _home(function: CheckFunction) -> str:
    """Name the module of a check; one with several files is a folder in the folder of its area."""
    path = function.__module__.split(".")
    return ".".join(path[:4] if path[:2] == ["fp8doctor", "checks"] else path)


def check(
    code: str,
    name: str,
    *,
    severity: Severity,
    area: str = "",
    explained_by: Iterable[str] = (),
    was: str | tuple[str, ...] = (),
    **properties: bool,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a rule; rules of one file have one code. ``properties`` are those of `Check`.

    The area is by default the file's folder in ``checks/``, elsewhere the folder around it. Raises ValueError
    if the code or name is malformed or taken.
    """

    def register(function: CheckFunction) -> CheckFunction:
        former = (was,) if isinstance(was, str) else was
        own = _home(function).split(".")[2:]  # the area and the check
        where = area or (own[0] if own else Path(function.__code__.co_filename).parent.name)
        new = Check(code, name, where, severity, tuple(explained_by), function, former, **properties)
        for field, (what, form) in FORMS.items():
            value = getattr(new, field)
            if not isinstance(value, str) or not re.fullmatch(form, value):
                raise ValueError(f"{code}: {value!r} is not {what}")
        for other in _checks.values():
            if {code, name} & {other.code, other.name} and _home(other.function) != _home(function):
                by = other.function.__module__
                raise ValueError(f"{code} {name} is already registered by {by} as {other.code} {other.name}")
        _checks[name] = new
        return function

    return register


FORMS = {
    "code": ("a code: three to five capital letters and three digits", r"[A-Z]{3,5}\d{3}"),
    "name": ("a name: words joined by hyphens", r"[\w.+-]+"),
    "severity": (f"a severity; they are {', '.join(SEVERITIES)}", "|".join(SEVERITIES)),
    "area": (f"an area; areas are {', '.join(AREAS)}", "|".join(AREAS)),
}
"""Field of a `Check` -> what it has to be, and its form."""


@functools.cache
def _import_own() -> None:
    """Import all checks of this package, once per process."""
    package = importlib.import_module("fp8doctor.checks")
    for module in pkgutil.walk_packages(package.__path__, OWN):
        importlib.import_module(module.name)


def discover(folders: Sequence[Path] = ()) -> tuple[Check, ...]:
    """List all checks, including those in ``folders``, by area and code, rules of a file in its order.

    Runs the Python files of a folder and its subfolders, each once per process; whatever they print goes to
    stderr. Raises `UserError` if a folder does not exist, or if a file cannot be imported.
    """
    _import_own()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"--checks {escaped(str(folder))}: no such folder")
        for path in sorted((*folder.glob("*.py"), *folder.glob("[!._]*/*.py"))):
            if not path.name.startswith((".", "__")) and path.is_file():
                _import(path)
    return tuple(sorted(_checks.values(), key=lambda each: (AREAS.index(each.area), each.code)))


def _import(path: Path) -> None:
    name = PREFIX + re.sub(r"\W", "_", str(path.resolve().with_suffix("")))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        for each in [each for each in _checks.values() if each.function.__module__ == name]:
            del _checks[each.name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"--checks {escaped(str(path))}: {error_in_words(error)}") from error


def check_of(finding: Finding) -> Check | None:
    _import_own()
    return _checks.get(finding.name)


def select(
    checks: Iterable[Check], selected: Sequence[str] = (), ignored: Sequence[str] = ()
) -> tuple[Check, ...]:
    """Keep rules whose code starts with one of ``selected`` and none of ``ignored``.

    An empty ``selected`` keeps all. A prefix that no code has names former codes. Raises `UserError` for one
    that no check has or had.
    """
    checks = tuple(checks)
    now = {each.code for each in checks}
    codes = now.union(RETIRED, *(each.was for each in checks))
    for prefix in (*selected, *ignored):
        if not any(code.startswith(prefix) for code in codes):
            raise UserError(
                f"no check has a code that begins with {prefix!r}; 'fp8doctor list' shows them all"
            )

    def named(each: Check, prefixes: Sequence[str]) -> bool:
        former = tuple(prefix for prefix in prefixes if not any(code.startswith(prefix) for code in now))
        return each.code.startswith(tuple(prefixes)) or any(code.startswith(former) for code in each.was)

    return tuple(
        each for each in checks if (not selected or named(each, selected)) and not named(each, ignored)
    )


def run(checks: Iterable[Check], facts: Facts) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Run every check and return its findings, and one outcome for each code.

    A rule that reads a fact that was not recorded is ``unknown``. A rule that raises anything else is
    ``crashed``; the others still run. A finding whose cause was found by another rule of its own file, as
    more than information, is dropped: that one says it. Information comes last, at the end that of rules
    which never say more.
    """
    checks = tuple(checks)
    answers = [(each, _answer(each, facts)) for each in checks]
    if any(
        isinstance(it, Finding) and it.name == NO_TENSOR_CORES and recorded(it, "breaks") for _, it in answers
    ):
        answers = [(each, _without_fp8(each, answer)) for each, answer in answers]
    found: dict[str, list[Finding]] = {}  # code, former code or name -> what it stands for
    for each, answer in answers:
        if isinstance(answer, Finding):
            for key in {each.code, each.name, *each.was}:
                found.setdefault(key, []).append(answer)
    findings: list[Finding] = []
    outcomes: dict[str, Outcome] = {}
    for each, answer in answers:
        if isinstance(answer, Finding):
            causes = [it for key in each.explained_by for it in found.get(key, ()) if it is not answer]
            if all(it.code != each.code or it.severity == "info" for it in causes):
                codes = tuple(dict.fromkeys(it.code for it in causes if it.code != each.code))
                findings.append(replace(answer, caused_by=codes))
            answer = Outcome(code=each.code, outcome="fires", area=each.area)
        known = outcomes.get(each.code, answer)
        outcomes[each.code] = min(known, answer, key=lambda each: GRAVEST_FIRST.index(each.outcome))
    never_graver = {each.name for each in checks if each.severity == "info"}
    in_order = sorted(findings, key=lambda each: (each.severity == "info", each.name in never_graver))
    return tuple(in_order), tuple(outcomes.values())


NO_TENSOR_CORES = "no-fp8-tensor-cores"
"""The rule that says that an FP8 step raises on this GPU; other rules of FP8 then say nothing."""

IN_BF16_TOO = ("layers_do_not_learn", "not_finite")
"""What a finding about FP8 may say of a step without it."""


def _without_fp8(check: Check, answer: Finding | Outcome) -> Finding | Outcome:
    if not isinstance(answer, Finding) or not check.changes_fp8 or answer.get("breaks") in IN_BF16_TOO:
        return answer
    reason = "no FP8 step runs on this GPU (GPU002)"
    return Outcome(code=check.code, outcome="not_applicable", reason=reason, area=check.area)


def _answer(check: Check, facts: Facts) -> Finding | Outcome:
    """Run one check: return its finding with registered properties, or its outcome."""

    def outcome(kind: Any, reason: str | None = None, **more: str) -> Outcome:
        return Outcome(code=check.code, area=check.area, outcome=kind, reason=reason, **more)

    try:
        is_own = check.function.__module__.startswith(OWN)
        with nullcontext() if is_own else redirect_stdout(sys.stderr):  # stdout belongs to the report
            answer = NO_FP8 if check.needs_fp8 and not facts.network.fp8 else check.function(facts)
        if answer is None:
            return outcome("silent")
        if not isinstance(answer, Finding | NotApplicable):
            raise TypeError(f"it returned a {type(answer).__name__}, not a Finding, a NotApplicable or None")
        from_builtins(type(answer), to_builtins(answer))  # or it could not be saved
    except Unrecorded as missing:
        path = path_of(missing)
        return outcome("unknown", missing.reason or why_missing(facts, path), missing=path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return outcome("crashed", error_in_words(error))
    if isinstance(answer, NotApplicable):
        return outcome("not_applicable", answer.reason)
    severity = answer.severity or check.severity
    return replace(answer, code=check.code, name=check.name, area=check.area, severity=severity)


def why_missing(facts: Facts, path: str) -> str:
    """Name the fact that a check could not read, with the reason of a parent or a part if one is known."""
    gaps = {**facts.get("gaps", {}), **facts.get("trial.gaps", {})}
    around = [text for gap, text in gaps.items() if f"{path}.".startswith(f"{gap}.")]
    within = [text for gap, text in gaps.items() if gap.startswith(f"{path}.")]
    return next((f"{path}: {reason}" for reason in around + within if reason), f"{path} was not recorded")
