"""FP8's health over a run as a page, and two runs side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from fp8doctor.health.record import OPERANDS, Health
from fp8doctor.health.verdict import Conclusion, HealthVerdict
from fp8doctor.render.table_page import Code, Heatmap, Sheet, Table
from fp8doctor.version import VERSION
from fp8doctor.wording import labels, percent, plural

LIMITS_PCT = (1.0, 5.0, 20.0, 50.0)
"""Shares from which the map gets darker."""

COLUMNS, ROWS = 48, 24
"""Largest size of the map without ``-v``: a column is the worst of its samples, and the worst layers are
shown."""

WORST = 5
"""Layers of the table, and notes."""

Judged = tuple[Health, HealthVerdict]
Part = Table | Code | Heatmap | str


def page(judged: Judged, *, verbose: bool = False) -> Sheet:
    """Lay out one run; ``verbose`` shows all layers."""
    health, verdict = judged
    header = health.headers[-1]
    heading = (f"fp8doctor {VERSION}", health.name, header.script, header.device)
    parts: list[Part] = [*_concluded(verdict.conclusions)]
    lost = health.lost()
    if lost:
        parts += [*_map(health, lost, verbose=verbose), _worst(health, lost)]
    return Sheet(tuple(filter(None, heading)), (verdict.summary,), tuple(parts), " ".join(_basis(health)))


def comparison(one: Judged, other: Judged) -> Sheet:
    """Lay out two runs side by side."""
    runs = (one[0], other[0])
    names = labels(*(each.name for each in runs))
    end = min(each.steps[-1] if each.steps else 0 for each in runs)
    losses = [
        next((sample.loss for _, sample in reversed(run.samples) if sample.step <= end), None) for run in runs
    ]
    rows = (
        ("last step", *(f"{each.steps[-1]:,}" if each.steps else "-" for each in runs)),
        (f"loss up to step {end:,}", *map(_number, losses)),
        ("largest share lost", *(percent(max(_highest(each.lost()).values(), default=0.0)) for each in runs)),
        ("layers with a fault", *(str(len(verdict.layers)) for _, verdict in (one, other))),
    )
    parts: list[Part] = [Table(("", *names), rows)]
    for name, (_, verdict) in zip(names, (one, other), strict=True):
        parts += [f"{name}: {verdict.summary}", *_concluded(verdict.conclusions)]
    summary = f"No loss is known in both runs up to step {end:,}."
    if losses[0] is not None and losses[1] is not None:
        higher = losses[1] - losses[0]
        word = "higher" if higher > 0 else "lower"
        summary = f"The loss of {names[1]} is {abs(higher):.3g} {word} at step {end:,}."
    return Sheet((f"fp8doctor {VERSION}", f"{names[1]} against {names[0]}"), (summary,), tuple(parts), "")


def as_json(judged: Sequence[Judged]) -> str:
    """Return what was sampled and concluded."""
    runs = [
        {
            "file": health.name,
            "verdict": msgspec.to_builtins(verdict),
            "jobs": msgspec.to_builtins(health.headers),
            "samples": msgspec.to_builtins([sample for _, sample in health.samples]),
            "lost_pct": health.lost(),
        }
        for health, verdict in judged
    ]
    return json.dumps({"schema_version": 1, "runs": runs}, indent=2) + "\n"


def _concluded(conclusions: Sequence[Conclusion]) -> Iterator[Part]:
    for each in conclusions:
        yield each.text
        if each.code:
            yield Code(each.code)


def _map(health: Health, lost: dict[str, dict[int, float]], *, verbose: bool) -> Iterator[Part]:
    """Draw the lost share of each layer's tensors over time."""
    highest = _highest(lost)
    kept = set(lost if verbose else sorted(lost, key=lambda name: -highest[name])[:ROWS])
    size = -(-len(health.steps) // COLUMNS)
    columns = [health.steps[at : at + size] for at in range(0, len(health.steps), size)]
    yield Heatmap(
        "share lost",
        tuple(f"step {each:,}" for each in (*(column[0] for column in columns[:-1]), health.steps[-1])),
        tuple(
            (name, tuple(max((by[step] for step in each if step in by), default=None) for each in columns))
            for name, by in lost.items()
            if name in kept
        ),
        LIMITS_PCT,
    )
    left = f" {len(lost) - len(kept)} layers with less are not shown (-v)." if len(kept) < len(lost) else ""
    yield (
        "Elements that FP8 turned to zero or that were too large for it, the worst of input, weight and "
        f"gradient: ░ from 1%, ▒ 5%, ▓ 20%, █ 50%.{left}"
    )


def _highest(lost: dict[str, dict[int, float]]) -> dict[str, float]:
    return {name: max(by.values(), default=0.0) for name, by in lost.items()}


def _worst(health: Health, lost: dict[str, dict[int, float]]) -> Table:
    """List the last sample of the layers that lost most."""
    series, highest = health.series(), _highest(lost)
    rows = []
    for name in sorted(lost, key=lambda name: -highest[name])[:WORST]:
        last = [series[name, each][-1][1] if (name, each) in series else None for each in OPERANDS]
        db = [None if cast is None else cast.sqnr_db for cast in last]
        rows.append((name, *map(_number, db), percent(lost[name].get(health.steps[-1], 0.0))))
    return Table(("signal to error, last sample", *(f"{each} dB" for each in OPERANDS), "lost"), tuple(rows))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _basis(health: Health) -> Iterator[str]:
    """Say what was sampled, what it cost, and what is unknown."""
    samples = [sample for _, sample in health.samples]
    yield f"{plural(len(samples), 'step')} sampled, on the job's own tensors."
    for first, last in [(samples[0], samples[-1])] if samples else []:
        at = [f"{_number(each.loss)} ({_number(each.gradient_norm)})" for each in (first, last)]
        yield f"Loss (gradient norm): {at[0]} at step {first.step:,}, {at[1]} at {last.step:,}."
    cost = sum(each.cost_ms or 0.0 for each in samples)
    if cost and samples[-1].step_ms:
        time = samples[-1].step_ms * max(1, samples[-1].step - health.headers[0].step)
        yield f"Samples took {percent(100 * cost / time)} of the time (measured)."
    if restarts := len(health.headers) - 1:
        yield f"The job was restarted {plural(restarts, 'time')}."
    for why, count in Counter(layer.unseen for layer in health.layers.values() if layer.unseen).items():
        yield f"Input and gradient of {plural(count, 'layer')} are unknown: {why}."
    notes = dict.fromkeys(note for each in samples for note in each.notes)
    yield from (f"{note[:1].upper()}{note[1:]}." for note in list(notes)[:WORST])
    if health.torn:
        yield f"{plural(health.torn, 'line')} of the file could not be read."
