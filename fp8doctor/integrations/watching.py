"""What the callbacks share: a few steps of a training are watched in its own process, and reported once."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fp8doctor import registry
from fp8doctor.api import codes
from fp8doctor.areas import SEVERITIES
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.diagnosis.engagement import why_not_engaged
from fp8doctor.errors import UserError
from fp8doctor.facts import Facts, Target
from fp8doctor.files import write_text
from fp8doctor.loading.given_batch import core
from fp8doctor.report import Report, ReportFailed
from fp8doctor.running.messages import Message, Note, Observed
from fp8doctor.running.settings import STEPS, WARMUP, Settings
from fp8doctor.wording import error_in_words, plural

if TYPE_CHECKING:
    from fp8doctor.running.observer import Observer

_log = logging.getLogger("fp8doctor")

FailOn = Literal["never", "info", "warning", "error"]

FEWEST_STEPS = 3

HELD_IN = "callback.report"
"""How a user reaches the report in Python."""


class Watching:
    """Watches ``steps`` steps of a training after ``warmup``, more while they still compile, and is out of
    the way.

    Then it reports, on stderr or to the file ``output`` (``.json``, ``.md``, else text), and keeps the
    `Report` as ``report``. With ``fail_on`` it raises `ReportFailed` where something is that grave, and with
    ``require_fp8`` when no layer trains in FP8 or nothing was examined. Nothing else that goes wrong here
    reaches the training: it is told in a sentence. ``select`` and ``ignore`` hold prefixes of codes. Of
    several processes the first alone watches, reports and raises.
    """

    report: Report | None = None
    """None before the window has ended, and in other processes than the first."""

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
    ) -> None:
        _check_counts(steps, warmup)
        check_fail_on(fail_on)
        self._output = Path(output) if output is not None else None
        self._fail_on, self._require_fp8 = fail_on, require_fp8
        self._select, self._ignore = codes("select", select), codes("ignore", ignore)
        try:
            registry.select(registry.discover(), self._select, self._ignore)
        except UserError as error:
            raise ValueError(str(error)) from None
        self._settings = Settings("", steps, warmup, stop=False, budget_s=None, device=None)
        self._observer: Observer | None = None
        self._heard = Heard()
        self._over = False

    def _begin(self, leads: bool, model: Any) -> None:
        """Watch a training that begins, or begins again after one that failed."""
        if not leads or self._over:
            return
        self._guarded(lambda: self._observe(model))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the observer: a copy has watched nothing."""
        return {**vars(self), "_observer": None}

    def _observe(self, model: Any) -> None:
        from fp8doctor.examine.conversion import is_fp8
        from fp8doctor.running.observer import Observer
        from fp8doctor.stacks.looking import modules_of

        target = Target(kind="live", name=type(core(model)).__name__, attribute=None)
        if self._observer is not None and not self._observer.taken:
            self._observer.examination.target = target
            return
        self._abandon()
        self._heard = Heard()
        observer = Observer(self._heard, self._settings)
        observer.examination.target = target
        if any(is_fp8(each) for _, each in modules_of(model)):
            observer.examination.watch = None  # a conversion was not seen
        observer.watch.__enter__()
        self._observer = observer
        weakref.finalize(self, _let_go, observer).atexit = False

    def _stepped(self, optimizer: Any, *, closure: bool = False) -> None:
        """Note that an optimizer has taken a step; after the last of the window, report."""
        if self._observer is None:
            return
        self._observer.stepped(optimizer, closure)
        if self._observer.done:
            self._finish()

    def _paused(self) -> None:
        """Something that is no training ran between two steps, such as an evaluation."""
        if self._observer is not None:
            self._observer.paused()

    def _end(self, *, failed: bool = False) -> None:
        """The training has ended: report what was seen where the window was not watched to its end."""
        observer = self._observer
        if observer is None:
            return
        needed = self._settings.warmup + self._settings.steps

        def close() -> None:
            steps = observer.closed()
            if observer.done:  # the window was watched to its end
                return
            observer.done = True
            observer.forget()
            self._heard.notes.append(
                f"the training ended after {plural(steps, 'step')}, before {needed} were watched: the report "
                "is of what was seen until then"
                if steps
                else "no training step was seen"
            )

        self._guarded(close)
        self._finish(gate=not failed)

    def _finish(self, *, gate: bool = True) -> None:
        self._abandon()
        self._over = True
        self._guarded(self._tell)
        if gate:
            hold(self.report, self._fail_on, self._require_fp8)

    def _converted(self) -> None:
        """Nothing is converted any more, and compiled code will run, which guards hooks: note no more."""
        if self._observer is not None:
            self._observer.watch.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Take everything out of the training's way."""
        observer, self._observer = self._observer, None
        if observer is not None:
            _let_go(observer)

    def _tell(self) -> None:
        """Say what was not seen, and report the rest."""
        for sentence in self._heard.notes:
            say(f"fp8doctor: {sentence}")
        if self._heard.facts is None:
            return
        report = Report.of(diagnose(self._heard.facts, select=self._select, ignore=self._ignore))
        self.report = report
        if self._output is None:
            say(report._printed(HELD_IN))
            return
        try:
            write_text(self._output, _rendered(report, self._output))
        except UserError as error:
            say(f"fp8doctor: {error}")
            say(report._printed(HELD_IN))

    def _guarded(self, part: Callable[[], None]) -> None:
        """Carry out a part of ours. What fails is told, and the training goes on."""
        try:
            part()
        except Exception as error:
            _log.debug("a callback failed", exc_info=True)
            self._abandon()
            self._over = True
            say(f"fp8doctor: it could not go on: {error_in_words(error)}")


def _let_go(observer: Observer) -> None:
    observer.watch.__exit__(None, None, None)
    if not observer.done:
        observer.give_up("the training was not watched to its end")


class Heard:
    """Stands where the messages of a watched script go, in the training's own process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.facts: Facts | None = None
        self.notes: list[str] = []

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a process that the training forked."""
        return os.getpid() != self.owner

    def send(self, message: Message) -> None:
        """Keep what the report needs."""
        if isinstance(message, Observed):
            self.facts = Facts.from_dict(message.facts)
        elif isinstance(message, Note):
            self.notes.append(message.text)


def _check_counts(steps: Any, warmup: Any) -> None:
    for name, value, least in (("steps", steps, FEWEST_STEPS), ("warmup", warmup, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} has to be a whole number, {least} or more, not {value!r}")


def check_fail_on(value: Any) -> None:
    """Raise ValueError for what no gate is called."""
    if value not in ("never", *SEVERITIES):
        raise ValueError(f"fail_on is one of never, {', '.join(SEVERITIES)}, not {value!r}")


def hold(report: Report | None, fail_on: FailOn, require_fp8: bool = False) -> None:
    """Raise `ReportFailed` where the report holds something as grave as that, or misses FP8 that is
    required."""
    if report is not None:
        report.raise_for(fail_on, require_fp8=require_fp8)
    elif require_fp8:
        raise ReportFailed(f"FP8 is required. {why_not_engaged(Facts())}", ())


def _rendered(report: Report, path: Path) -> str:
    if path.suffix == ".json":
        return report.to_json()
    return report._repr_markdown_() if path.suffix == ".md" else report._printed(HELD_IN)


def say(text: str) -> None:
    """Print on stderr, beside a progress bar that may be there."""
    from tqdm import tqdm

    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            tqdm.write(text, file=sys.stderr)
