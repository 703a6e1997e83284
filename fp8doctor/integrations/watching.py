"""Watch a few steps of a training in its own process, and report once."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8doctor import registry
from fp8doctor.answer.verdict import why_not_engaged
from fp8doctor.api import check_limits, codes
from fp8doctor.areas import SEVERITIES
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Target
from fp8doctor.files import write_text
from fp8doctor.loading.synthetic_batch import core
from fp8doctor.report import Report, ReportFailed
from fp8doctor.running.script_messages import Message, WatchOptions
from fp8doctor.stages import STEPS, WARMUP
from fp8doctor.wording import error_in_words, plural

if TYPE_CHECKING:
    from fp8doctor.running.observer import ScriptObserver

_log = logging.getLogger("fp8doctor")

FailOn = Literal["never", "info", "warning", "error"]


class Watching:
    """Watches ``steps`` steps of a training after ``warmup``, more while they compile.

    Then it reports on stderr or to the file ``output`` (``.json``, ``.md``, else text), and keeps the
    `Report` as ``report``. It raises `ReportFailed` for a finding at or above ``fail_on``, and with
    ``require_fp8`` if no layer trains in FP8 or nothing was examined. Other failures never reach the
    training: they are printed. ``select`` and ``ignore`` are prefixes of codes. ``health`` names a file for
    samples of FP8's health, taken to the training's end every ``every`` steps; without it, as often as costs
    less than 1%. With ``budget_s`` the training pauses once, to time copies of its step in BF16, FP8 and with
    each fix for about so many seconds, on ``device`` (None: the GPU, if there is one). Only the first of
    several processes watches, times, reports, raises and samples; the others wait in their next exchange.
    """

    report: Report | None = None
    """None until the window has ended, and in other processes than the first."""

    def __init__(
        self,
        *,
        steps: int = STEPS,
        warmup: int = WARMUP,
        output: str | Path | None = None,
        fail_on: FailOn = "never",
        require_fp8: bool = False,
        select: str | Sequence[str] | None = None,
        ignore: str | Sequence[str] | None = None,
        health: str | Path | None = None,
        every: int | None = None,
        budget_s: float | None = None,
        device: str | None = None,
    ) -> None:
        for name, value, least in (("steps", steps, 3), ("warmup", warmup, 1), ("every", every, 1)):
            right = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not right and not (name == "every" and value is None):
                raise UserError(f"{name} has to be a whole number, {least} or more, not {value!r}")
        check_limits(budget_s)
        check_fail_on(fail_on)
        self._output = Path(output) if output is not None else None
        self._fail_on, self._require_fp8 = fail_on, require_fp8
        self._select, self._ignore = codes("select", select), codes("ignore", ignore)
        registry.select(registry.discover(), self._select, self._ignore)
        file = None if health is None else str(Path(health))
        self._options = WatchOptions(
            "", steps, warmup, stop=False, budget_s=budget_s, device=device, health=file, every=every
        )
        self._observer: ScriptObserver | None = None
        self._over = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what watches: a copy has watched nothing."""
        return {**vars(self), "_observer": None}

    def _begin(self, leads: bool, model: Any) -> None:
        """Watch a training that begins, or begins again after a failure."""
        if leads and not self._over:
            self._guarded(lambda: self._observe(model))

    def _observe(self, model: Any) -> None:
        from fp8doctor.running.observer import ScriptObserver
        from fp8doctor.stacks import is_fp8
        from fp8doctor.stacks.looking import modules_of

        target = Target(kind="live", name=type(core(model)).__name__, attribute=None)
        if self._observer is not None and not self._observer.all_steps:
            self._observer.target = target
            return
        self._abandon()
        options = self._options._replace(script=target.name)
        self._observer = observer = ScriptObserver(_say_note, options)  # without a reference to the callback
        observer.target = target
        observer.sees_conversions = not any(is_fp8(each) for _, each in modules_of(model))
        observer.begin()
        weakref.finalize(self, observer.release).atexit = False

    def _stepped(self, optimizer: Any) -> None:
        """Note an optimizer step; report after the window's last."""
        if (observer := self._observer) is not None:
            observer.stepped(optimizer)
            if observer.done and not self._over:
                self._guarded(observer.time_copies)
                self._finish(observer)

    def _paused(self) -> None:
        """Leave out what ran between two steps, such as an evaluation."""
        if self._observer is not None:
            self._observer.paused()

    def _end(self, *, failed: bool = False) -> None:
        """Report at the end of the training, if the window was still open."""
        observer = self._observer
        if observer is None or self._over:
            self._abandon()
            return
        if not (observer.done or observer.complete):
            needed = self._options.warmup + self._options.steps
            say(
                f"fp8doctor: the training ended after {plural(observer.steps, 'step')}, before {needed} were "
                "watched: the report is of what was seen until then"
                if observer.steps
                else "fp8doctor: no training step was seen"
            )
        self._guarded(observer.closed)
        self._abandon()
        self._finish(observer, gate=not failed)

    def _finish(self, observer: ScriptObserver, *, gate: bool = True) -> None:
        """Report. Only samples of FP8's health go on."""
        self._converted()
        if observer.long is None:
            self._abandon()
        self._over = True
        if (facts := observer.facts) is not None:
            self._guarded(lambda: self._report(facts))
        if gate and self.report is not None:
            self.report.raise_for(self._fail_on, require_fp8=self._require_fp8)
        elif gate and self._require_fp8:
            raise ReportFailed(f"FP8 is required. {why_not_engaged(Facts())}", ())

    def _converted(self) -> None:
        """Stop watching conversions: compiled code, which guards hooks, will run."""
        if self._observer is not None:
            self._observer.conversions_end()

    def _abandon(self) -> None:
        observer, self._observer = self._observer, None
        if observer is not None:
            observer.release()

    def _report(self, facts: Facts) -> None:
        report = Report.of(diagnose(facts, select=self._select, ignore=self._ignore))
        self.report = report
        if self._output is not None:
            try:
                write_text(self._output, _rendered(report, self._output))
                return
            except UserError as error:
                say(f"fp8doctor: {error}")
        say(str(report))

    def _guarded(self, part: Callable[[], object]) -> None:
        """Run a part of ours; a failure is printed, and the training goes on."""
        try:
            part()
        except Exception as error:
            _log.debug("a callback failed", exc_info=True)
            self._abandon()
            self._over = True
            say(f"fp8doctor: it could not go on: {error_in_words(error)}")


def check_fail_on(value: Any) -> None:
    if value not in ("never", *SEVERITIES):
        raise UserError(f"fail_on is one of never, {', '.join(SEVERITIES)}, not {value!r}")


def _rendered(report: Report, path: Path) -> str:
    if path.suffix == ".json":
        return str(report.to_json())
    return report.to_markdown() if path.suffix == ".md" else str(report)


def _say_note(message: Message) -> None:
    if message.note is not None:
        say(f"fp8doctor: {message.note}")


def say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr)
