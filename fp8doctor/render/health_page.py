"""FP8's health over a run as a page."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8doctor.health.record import OPERANDS, Health
from fp8doctor.health.verdict import HealthVerdict
from fp8doctor.render.page import Code, Heatmap, Page, Part, Quiet, Strong, Table, number
from fp8doctor.version import VERSION
from fp8doctor.wording import percent, plural

LIMITS_DB = (20.0, 15.0, 10.0, 5.0)
"""Ratios below which the map gets darker. Sound E5M2 tensors have about 26 dB, E4M3 32."""

COLUMNS, ROWS, WORST = 48, 24, 5
"""Largest size of the map without ``-v``: a column is the worst of its samples, and the worst layers are
shown; rows of the table."""


def page(health: Health, verdict: HealthVerdict, *, verbose: bool = False) -> Page:
    """Lay out one run; ``verbose`` shows all layers."""
    header = health.headers[-1]
    heading = (f"fp8doctor {VERSION}", health.name, header.script, header.device or "")
    by_layer = health.lowest_db()
    worst = sorted(by_layer, key=lambda name: min(by_layer[name].values()))
    parts: list[Part] = [Strong(verdict.summary)]
    for each in verdict.conclusions:
        parts += [each.text, Code(each.code)]
    if by_layer:
        parts += [*_map(health, by_layer, set(by_layer if verbose else worst[:ROWS])), _last(health, worst)]
    return Page(heading, (*parts, Quiet(" ".join(_basis(health)))))


def _map(health: Health, by_layer: dict[str, dict[int, float]], kept: set[str]) -> Iterator[Part]:
    """Draw the lowest ratio of each layer over time."""
    size = -(-len(health.steps) // COLUMNS)
    columns = [health.steps[at : at + size] for at in range(0, len(health.steps), size)]
    rows = [
        (name, tuple(min((by[step] for step in each if step in by), default=None) for each in columns))
        for name, by in by_layer.items()
        if name in kept
    ]
    steps = (*(column[0] for column in columns[:-1]), health.steps[-1])
    yield Heatmap(
        "signal to rounding error", tuple(f"step {each:,}" for each in steps), tuple(rows), LIMITS_DB
    )
    hidden = len(by_layer) - len(kept)
    left = f" {plural(hidden, 'sounder layer')} left out (-v)." if hidden else ""
    yield f"The lowest of input, weight and gradient: ░ below 20 dB, ▒ 15, ▓ 10, █ 5.{left}"


def _last(health: Health, worst: Sequence[str]) -> Table:
    series = health.series()
    rows = []
    for name in worst[:WORST]:
        last = [series[name, each][-1][1] if (name, each) in series else None for each in OPERANDS]
        flushed = max((cast.flushed_pct or 0.0 for cast in last if cast is not None), default=0.0)
        rows.append(
            (name, *(number(None if cast is None else cast.lowest_db) for cast in last), percent(flushed))
        )
    return Table(("last sample", *(f"{each} dB" for each in OPERANDS), "flushed"), tuple(rows))


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _basis(health: Health) -> Iterator[str]:
    """Say what was sampled, what it cost, and what is unknown."""
    samples = [sample for _, sample in health.samples]
    yield f"{plural(len(samples), 'step')} sampled, on the job's own tensors."
    if samples:
        first, last = samples[0], samples[-1]
        one, other = (f"{_loss(each.loss)} ({_loss(each.gradient_norm)})" for each in (first, last))
        yield f"Loss (gradient norm): {one} at step {first.step:,}, {other} at {last.step:,}."
        cost_ms = sum(each.cost_ms or 0.0 for each in samples)
        time_ms = (last.step_ms or 0.0) * max(1, last.step - health.headers[0].step)
        if cost_ms and time_ms:
            yield f"Samples took {percent(100 * cost_ms / time_ms)} of the time (measured)."
    if restarts := len(health.headers) - 1:
        yield f"The job was restarted {plural(restarts, 'time')}."
    for why, count in Counter(layer.unseen for layer in health.layers.values() if layer.unseen).items():
        yield f"Input and gradient of {plural(count, 'layer')} are unknown: {why}."
    notes = dict.fromkeys(note for each in samples for note in each.notes)
    yield from (f"{note[:1].upper()}{note[1:]}." for note in list(notes)[:WORST])
