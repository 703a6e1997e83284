"""Every sentence of an answer: a template for each line and case. A sentence computes nothing.

`TEMPLATES` is a closed set; ``docs/sentences.md`` counts who needs each. Add one only if three recordings do.
"""

import re
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from fp8doctor.analysis.arms import Variant
from fp8doctor.analysis.significance import Number
from fp8doctor.analysis.step_difference import PART_NAMES, REST, UNEXPLAINED, signed
from fp8doctor.answer.causes import Cause
from fp8doctor.answer.items import HOW_KNOWN, saves
from fp8doctor.answer.record import Answer
from fp8doctor.answer.verdict import GRAVE
from fp8doctor.facts.arm_names import ArmName
from fp8doctor.wording import in_ms, in_times

Tone = Literal["bad", "good", "plain"]

TEMPLATES = {
    "title.said": "{title}",
    "title.side": "{fp8} {verb} {size}",
    "title.open": "Open: {fp8} {verb} {low:.2f}x to {high:.2f}x the speed of BF16",
    "title.whole": "{title}; the whole step is {bounds}",
    "title.unknown": "Open: whether {fp8} {verb} faster than BF16",
    "numbers.two": "{fp8:,.1f} and {bf16:,.1f} ms/step, {basis}",
    "numbers.fault": "{low} {fp8:,.1f}, BF16 {bf16:,.1f} ms/step, {basis}",
    "numbers.one": "now {now:,.1f} ms/step, {basis}",
    "why.cause": "{title}",
    "why.cost": "{title}: {ms:,.1f} ms{where}",
    "why.part": "FP8 adds {gain}, mostly {part}",
    "why.parts": "{parts} ms{where}",
    "why.unknown": "Not known: {reason}",
    "fix.step": "{summary}",
    "fix.nothing": "Nothing surely better for speed",
    "fix.unchecked": "Nothing found so far",
    "fix.beside": "Nothing surely better for speed; below: {codes}",
    "fix.open": "Nothing until this is known",
    "then.mended": "{mended}",
    "then.unknown": "not known",
    "then.time": "{ms}{basis}",
    "then.above": "the {form} step above",
    "then.gain": "{size} {than}",
    "then.range": "{low:.2f}x to {high:.2f}x the speed of {of}",
    "then.fp8": "fastest FP8 timed: {ms}",
    "sure.yes": "yes: {interval}{doubts}",
    "sure.no": "no: {why}",
    "sure.likely": "likely: {interval}, estimated for {gpu}",
    "sure.fault": "yes, {seen}",
    "open.question": "{what}{command}",
}
"""Line and case -> its words."""

MENDED = {
    "step_raises": "the step runs",
    "layers_do_not_learn": "the layers train",
    "not_finite": "check that the loss stays finite",
    "fp8_not_engaged": "{low} runs",
}
"""Status -> what a fix of its fault brings before any speed."""

PARTS = PART_NAMES | {REST: "rest", UNEXPLAINED: "unexplained"}
"""Part of the difference -> its name; the rest holds the smaller parts too, unlike ``other`` of the table."""


class Line(Struct, frozen=True):
    """One sentence, and the template that it fills."""

    template: str
    text: str


class Row(Struct, frozen=True):
    """The lines that answer one question."""

    label: str
    lines: tuple[Line, ...]


class Box(Struct, frozen=True):
    """The answer in words: what FP8 is now, and a row for each further question."""

    tone: Tone
    title: Line
    numbers: Line | None
    rows: tuple[Row, ...]

    @property
    def lines(self) -> Iterator[Line]:
        yield self.title
        if self.numbers:
            yield self.numbers
        for row in self.rows:
            yield from row.lines

    @property
    def headline(self) -> str:
        """Join the title and its numbers."""
        return ": ".join(each.text for each in (self.title, self.numbers) if each)

    @property
    def summary(self) -> str:
        """Join the headline and the rows to prose, for the JSON and build servers."""
        rows = (f"{row.label}: {'; '.join(each.text.rstrip('.') for each in row.lines)}" for row in self.rows)
        return " ".join(f"{each.rstrip('.')}." for each in (self.headline, *rows))


def say(template: str, **values: object) -> Line:
    return Line(template, TEMPLATES[template].format(**values))


def box(said: Answer) -> Box:
    """Write the box of an answer."""
    memory = said.memory
    is_large = memory is not None and memory.may_be_too_large and said.status != "does_not_fit"
    rows = {
        "Memory": [say("why.cause", title=memory.sentence.partition(". ")[0])] if memory and is_large else [],
        "Why": _why(said),
        "Fix": _fix(said),
        "Then": _then(said),
        "Sure": [_sure(said)],
        "Open": [
            say("open.question", what=each.what, command=f": {each.command}" if each.command else "")
            for each in said.open
        ],
    }
    told = (Row(label, tuple(lines)) for label, lines in rows.items())
    return Box(_tone(said), _title(said), _numbers(said), tuple(each for each in told if each.lines))


def _tone(said: Answer) -> Tone:
    """Say how an answer looks: bad if the exit code is 1 by default."""
    slower = said.status == "fp8_slower" and said.basis == "measured"
    errors = any(each.mark == "bad" for each in said.items)
    if said.fault or errors or slower or said.status in GRAVE:
        return "bad"
    speedup = said.speedup
    whole_open = said.lacks_whole or bool(said.whole and said.whole[0] < 1)
    good = speedup is not None and speedup.side == "faster" and not whole_open
    return "good" if good and not (said.memory and said.memory.may_be_too_large) else "plain"


def _title(said: Answer) -> Line:
    found, verb = said.speedup, "is" if said.has_fp8 else "would be"
    fp8 = f"{said.low_precision}{' compute' if said.is_compute else ''}"
    if said.fault or said.state:
        return say("title.said", title=said.fault.title if said.fault else said.state)
    if found is None and (said.has_fp8 or (said.compared.now and not said.takes_no_fp8)):
        return say("title.unknown", fp8=said.low_precision, verb=verb)
    if found is None:
        return say("title.said", title="No FP8 training here")
    if found.side == "open":
        title = say("title.open", fp8=fp8, verb=verb, low=found.low, high=found.high)
    else:
        verb += " likely" * (found.has_open_size and found.basis != "measured")
        title = say("title.side", fp8=fp8, verb=verb, size=_than(found, "BF16"))
    if not (said.lacks_whole or said.whole):
        return title
    bounds = _interval(said.whole_bounds) if said.whole_bounds else "open"
    return say("title.whole", title=title.text, bounds=bounds)


def _numbers(said: Answer) -> Line | None:
    """Write the two times of the title, or the only one; of one clock."""
    fp8, bf16, now = said.compared.fp8, said.compared.bf16, said.compared.now
    if fp8 and bf16 and _shows_both(said):
        each = tuple(dict.fromkeys(HOW_KNOWN[one.ms.basis] for one in (fp8, bf16)))
        case, depths = "numbers.fault" if said.fault else "numbers.two", " at two depths" * said.is_cut
        basis = " and ".join(f"{how}{depths * (how == HOW_KNOWN['measured'])}" for how in each)
        return say(case, low=said.low_precision, fp8=fp8.ms.value, bf16=bf16.ms.value, basis=basis)
    if now:
        return say("numbers.one", now=now.ms.value, basis=HOW_KNOWN[now.ms.basis])
    return None


def _shows_both(said: Answer) -> bool:
    """Return whether the times of FP8 and BF16 stand above. Two times tell a size, so a range has to be."""
    found = said.speedup
    return found is not None and (not found.has_open_size or (found.side == "open" and not said.fault))


def _size(found: Number, *, is_gain: bool = False) -> str:
    """Write a speedup as a size and a side: 2.48x slower; as its side alone if its size is open.

    A gain that is sure is no tie, however small.
    """
    if found.side == "even" and not (is_gain and found.low > 1):
        return "about as fast"
    if found.has_open_size:
        return found.side
    times = max(found.value, 1 / found.value)
    return f"{in_times(times)} {'faster' if found.value > 1 else 'slower'}"


def _than(found: Number, of: str, *, is_gain: bool = False) -> str:
    """Compare with a step: as a size and a side, or as a range if that allows both and is no wide one."""
    if found.side == "open":
        in_range = say("then.range", low=found.low, high=found.high, of=of).text
        return f"slower or faster than {of}" if found.has_open_size else in_range
    size = _size(found, is_gain=is_gain)
    return say("then.gain", size=size, than=f"{'as' if size.endswith('as fast') else 'than'} {of}").text


def _interval(found: Number) -> str:
    """Write the interval of a speedup: 2.4x to 2.6x slower, at least 3.1x slower."""
    if not found.low:
        return f"at most {in_times(found.high)} the speed of BF16"
    if found.side in ("open", "even"):
        return f"{found.low:.2f}x to {found.high:.2f}x the speed of BF16"
    ends = (found.low, found.high) if found.value > 1 else (1 / found.high, 1 / found.low)
    if found.has_open_size:
        return f"at least {in_times(ends[0])} {found.side}"
    told, size = [*map(in_times, ends)], _size(found)
    if any(map(size.startswith, told)):  # so the title says it, with one digit
        told = [f"{end:.2f}x" for end in ends]
    return f"{' to '.join(dict.fromkeys(told))} {found.side}"


def _why(said: Answer) -> Iterator[Line]:
    for cause in said.causes:
        yield _cause(cause)
    if said.dearest:
        gain = "more than its matmuls save" if said.saves_matmuls else "time"
        yield say("why.part", gain=gain, part=PARTS.get(said.dearest, said.dearest))
    if said.speedup and said.shows_parts:
        named = [f"{PARTS.get(name, name)} {signed(ms)}" for name, ms in said.parts_ms.items()]
        where = "" if said.speedup.basis == "measured" else " (estimated)"
        yield say("why.parts", parts=", ".join(named), where=where)
    if said.why_unknown and said.takes_no_fp8:
        yield say("why.cause", title=said.why_unknown)
    elif said.why_unknown:
        yield say("why.unknown", reason=said.why_unknown)


USUAL_WORDS, MOST_WORDS = 14, 24
"""Words of a cause or a fix in the box: beyond the first it loses its asides, beyond the second its end."""

ASIDE = re.compile(r"(?<!:) \((?!estimated\))[^()]*\)")
"""Part of a title that only adds to it."""


def in_short(text: str) -> str:
    """Leave out asides, then whole sentences, then words, until a text fits a line or two of the box."""
    if len(text.split()) > USUAL_WORDS:
        text = ASIDE.sub("", text)
    if len(text.split()) <= MOST_WORDS:
        return text.rstrip(".")
    first = text.partition(". ")[0].split()
    return " ".join(first if len(first) <= MOST_WORDS else [*first[:MOST_WORDS], "..."])


def _cause(cause: Cause) -> Line:
    title = in_short(re.sub(r" \(\d+ x \d+\)", "", cause.title))  # shapes stand with the finding
    title = f"{title[:1].upper()}{title[1:]}" if title.partition(" ")[0].isalpha() else title
    if not cause.ms or " ms" in title:
        return say("why.cause", title=title)
    return say("why.cost", title=title, ms=cause.ms, where=" in FP8" * cause.in_fp8)


def _fix(said: Answer) -> Iterator[Line]:
    first = said.fault.first if said.fault else ""
    if first:
        yield say("fix.step", summary=first)
    for number, step in enumerate(said.fixes, 1):
        summary = step.treatment.summary
        summary = in_short(summary if len(summary.split()) <= USUAL_WORDS else summary.partition(": ")[0])
        summary = f"{summary[:1].upper()}{summary[1:]}"
        yield say("fix.step", summary=f"{number}. {summary}" if len(said.fixes) > 1 else summary)
    if said.fixes or first:
        return
    side, codes = said.speedup.side if said.speedup else "open", said.codes_beside
    if said.fault:
        yield say("fix.step", summary="No fix is known")
    elif said.takes_no_fp8 or side == "slower":
        yield say("fix.step", summary="Train in BF16")
    elif side in ("even", "faster") and (codes or said.unchecked or not said.open):
        alone = "fix.unchecked" if said.unchecked else "fix.nothing"
        yield say("fix.beside", codes=", ".join(codes)) if codes else say(alone)
    elif said.open:
        yield say("fix.open")


def _then(said: Answer) -> Iterator[Line]:
    """Write what the plan ends: a fault, then the step's time."""
    compared, end = said.compared, said.compared.end
    yield from _mended(said)
    same = end is not None and compared.now is not None and end.name == compared.now.name
    if end is not None and said.fixes and (not same or compared.gain or compared.end_speedup):
        is_open = end.ms.has_open_size and end.ms.basis != "measured"
        told = ", ".join(_end(said, end))
        yield Line("then.time", told + " (estimated)" * is_open) if told else say("then.unknown")
    elif said.fixes and not (said.mends or said.fits_in_gib):
        number, saving = said.largest_saving or (0, None)
        by = f"fix {number} " * (len(said.fixes) > 1)
        yield say("then.mended", mended=f"{by}{saves(saving)}") if saving else say("then.unknown")


def _mended(said: Answer) -> Iterator[Line]:
    if said.mends and said.status in MENDED and not (said.leaves_fp8 and said.status == "fp8_not_engaged"):
        yield say("then.mended", mended=MENDED[said.status].format(low=said.low_precision))
    elif said.ends_finite:
        yield say("then.mended", mended="the loss is finite")
    if said.memory and said.fits_in_gib:
        after, whole = said.fits_in_gib, said.memory.gpu_gib
        yield say("then.mended", mended=f"about {after:,.0f} of {whole:,.0f} GiB (estimated)")


def _end(said: Answer, end: Variant) -> list[str]:
    """Write the time of the plan's end, and how it compares; a number that stands above is not said again."""
    compared, gain, than_bf16 = said.compared, said.compared.gain, said.compared.end_speedup
    timed = end.ms.basis == "measured"
    shown = [each for each in (compared.fp8, compared.bf16) if each and _shows_both(said)]
    above = any(each.in_fp8 == end.in_fp8 and in_ms(each.ms.value) == in_ms(end.ms.value) for each in shown)
    told = []
    if above:
        told = [say("then.above", form=said.low_precision if end.in_fp8 else "BF16").text]
    elif timed or not end.ms.has_open_size:
        told = [say("then.time", ms=in_ms(end.ms.value), basis="" if timed else " (estimated)").text]
    size = _size(said.speedup) if said.speedup and not said.fault else ""
    if gain and not (above and _size(gain).partition(" ")[0] == size.partition(" ")[0]):
        told.append(_than(gain, _now(said), is_gain=True))
    bf16 = "BF16 with the same changes" if compared.is_fair else "the best BF16"
    if than_bf16 and (than_bf16.side == "open" or not (above and _size(than_bf16) == size)):
        told.append(_than(than_bf16, bf16))
    best = compared.best_fp8
    if best and best.name != ArmName.AS_IS:
        told.append(say("then.fp8", ms=in_ms(best.ms.value)).text)
    of = ["for as many tokens"] if compared.per_token else []
    of += ["compute alone"] if said.is_compute and timed else []
    of += [f"with fix {' and '.join(map(str, said.timed_fixes))}"] if timed and said.timed_fixes else []
    return [f"{' '.join(of)}: {told[0]}", *told[1:]] if of and told else told


def _now(said: Answer) -> str:
    """Name the step as it is; an estimated one with its time, unless that stands above."""
    now, above = said.compared.now, (said.compared.fp8, said.compared.bf16)
    if now is None or now.ms.basis == "measured":
        return "its copy now" if said.is_compute else "now"
    is_above = not _shows_both(said) or any(each and each.name == now.name for each in above)
    return "now" if is_above else f"now ({in_ms(now.ms.value)})"


def _sure(said: Answer) -> Line:
    found = said.speedup
    if said.fault:
        read = "by its estimated memory" if said.status == "does_not_fit" else "read from the job"
        seen = "the fault was seen when the job ran" if said.fault.was_seen else read
        doubts = f"; the times may be off: {said.doubts[0]}" if said.doubts and said.fixes else ""
        return say("sure.fault", seen=f"{seen}{doubts}")
    clock = said.compared.now is not None and said.compared.now.ms.basis == "measured"
    if said.status != "open" and (said.state or said.takes_no_fp8):
        return say("sure.fault", seen="read from the job")
    if found is None:
        others = said.steps is not None and any(said.steps.rows)
        untimed = "your step was not timed" if others else "nothing was timed"
        alone = "only your step was timed"
        if said.compared.bf16:
            has_fp8 = said.has_fp8 or said.compared.fp8
            alone = "the BF16 that decides has no time" if has_fp8 else "FP8 was not timed"
        return say("sure.no", why=alone if clock else untimed)
    interval = f"{_interval(found)}{' (compute)' if said.is_compute and found.basis == 'measured' else ''}"
    if found.basis != "measured":
        gpu = said.compared.gpu or "this GPU"
        if found.side != "open":
            return say("sure.likely", interval=interval, gpu=gpu)
        fp8, elsewhere = said.compared.fp8, " on it" if said.steps and said.steps.rows else ""
        form = "BF16" if said.has_fp8 or fp8 is None or fp8.ms.basis == "measured" else fp8.words
        timed = f"your step was timed, {form} is" if clock else f"nothing was timed{elsewhere},"
        return say("sure.no", why=f"{timed} estimated for {gpu}")
    doubts = "; ".join(said.doubts)
    if found.side == "open":
        return say("sure.no", why=doubts or "the times scatter")
    return say("sure.yes", interval=interval, doubts=f"; {doubts}" * bool(doubts))
