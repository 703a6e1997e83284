"""Records of FP8's health and their file: JSON lines, appended one by one.

A header is written when the job starts and after each restart, then a line per sampled step. Each line is one
write to a file opened for appending: a process that is killed leaves whole lines and at most one torn one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fp8doctor.errors import UserError
from fp8doctor.facts.record import decoder
from fp8doctor.version import VERSION

FORMAT = 1
"""Version of the file's format. Fields are added at the end, never renamed."""

OPERANDS = ("input", "weight", "gradient")
"""Tensors that a layer casts, in the order of a sample: its input, its weight, the gradient of its output."""

DIGITS = 5
"""Significant digits of a saved number."""


class CastHealth(msgspec.Struct, frozen=True, array_like=True):
    """What one cast did to one tensor; None if it is unknown."""

    sqnr_db: float | None = None
    """Power of the tensor / power of the rounding error, in dB; None if the error is zero."""
    saturated_pct: float | None = None
    """Elements beyond the largest number of the FP8 type, in percent of all."""
    flushed_pct: float | None = None
    """Elements that became zero, in percent of those that are not zero."""
    amax: float | None = None
    """Largest magnitude; None if not finite."""
    used: float | None = None
    """Largest magnitude / the largest that the scale in use can hold; None if the tensor's own gives the
    scale. Above 1 it saturates."""
    of_history: float | None = None
    """Largest magnitude / the largest in the layer's amax history; None without a history."""
    non_finite: int | None = None
    """Elements that are not finite, of those that were counted."""
    typical_db: float | None = None
    """Ratio of the row in the middle, in dB; None if more than half of the rows are exact, or zero."""


class HealthLayer(msgspec.Struct, frozen=True):
    """An FP8 layer of the job."""

    name: str
    kind: str
    stack: str
    recipe: str | None = None
    unseen: str | None = None
    """Why input and gradient are unknown; None if they are sampled."""


class Header(msgspec.Struct, frozen=True, tag="job"):
    """The job, at its start and at each restart."""

    format: int
    version: str
    script: str
    every: int | None
    """Steps between samples; None if the sampler chooses."""
    step: int
    """Step after which this process began to sample."""
    layers: tuple[HealthLayer, ...]
    torch: str | None = None
    device: str | None = None
    notes: tuple[str, ...] = ()


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One sampled step."""

    step: int
    loss: float | None
    """The loss that the backward passes started from, summed over micro-batches; None if unknown, or not
    finite with a step in ``FirstBad``."""
    gradient_norm: float | None
    """Norm of all gradients of this process, before clipping."""
    layers: tuple[tuple[CastHealth | None, CastHealth | None, CastHealth | None], ...]
    """In the order of the header's layers, and of `OPERANDS`."""
    cost_ms: float | None = None
    """What the sample added to its step."""
    step_ms: float | None = None
    """Time of a step without a sample."""
    notes: tuple[str, ...] = ()


class FirstBad(msgspec.Struct, frozen=True, tag="first_bad"):
    """The first step whose loss or gradient is not finite."""

    step: int
    what: str
    """``loss`` or ``gradient``."""
    layer: str | None
    tensor: str | None
    fp8: bool | None
    """The layer trains in FP8."""
    sentence: str


Line = Header | Sample | FirstBad


class HealthFile:
    """Appends lines to a file; a torn last line is closed first. Raises `UserError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._number).st_size
            if size and os.pread(self._number, 1, size - 1) != b"\n":
                os.write(self._number, b"\n")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None

    def append(self, line: Line) -> None:
        """Write one line. Raises OSError."""
        os.write(self._number, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        os.close(self._number)


def significant(number: float) -> float | None:
    """Round a number to `DIGITS`; None if it is not finite."""
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


Series = dict[tuple[str, str], list[tuple[int, CastHealth]]]


class Health(msgspec.Struct, frozen=True):
    """All that a file holds."""

    name: str
    headers: tuple[Header, ...]
    samples: tuple[tuple[Header, Sample], ...]
    """In the order of steps. A restarted job replaces the samples after its checkpoint."""
    first_bad: tuple[FirstBad, ...] = ()
    torn: int = 0
    """Lines that could not be read."""

    @property
    def layers(self) -> dict[str, HealthLayer]:
        """All layers by name, as last described."""
        return {layer.name: layer for header in self.headers for layer in header.layers}

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sample.step for _, sample in self.samples)

    def series(self) -> Series:
        """List each cast of each layer over the sampled steps."""
        found: Series = {}
        for header, sample in self.samples:
            for layer, casts in zip(header.layers, sample.layers, strict=False):
                for operand, cast in zip(OPERANDS, casts, strict=False):
                    if cast is not None:
                        found.setdefault((layer.name, operand), []).append((sample.step, cast))
        return found

    def lost(self) -> dict[str, dict[int, float]]:
        """Return the largest share of a tensor that each layer lost, in percent, by step."""
        found: dict[str, dict[int, float]] = {}
        for (layer, _), series in self.series().items():
            by_step = found.setdefault(layer, {})
            for step, cast in series:
                share = 100.0 if cast.non_finite else max(cast.flushed_pct or 0.0, cast.saturated_pct or 0.0)
                by_step[step] = max(share, by_step.get(step, 0.0))
        return {name: found[name] for name in self.layers if name in found}


def read_health(path: Path) -> Health:
    """Read a file. Raises `UserError` if it holds no health of a job."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    headers: list[Header] = []
    samples: list[tuple[Header, Sample]] = []
    bad: list[FirstBad] = []
    torn = 0
    for line in _lines(text):
        if line is None:
            torn += 1
        elif isinstance(line, Header):
            if line.format > FORMAT:
                raise UserError(
                    f"{path} was written by fp8doctor {line.version}, which is newer than {VERSION}"
                )
            headers.append(line)
        elif isinstance(line, FirstBad):
            bad.append(line)
        elif headers:
            while samples and samples[-1][1].step >= line.step:
                samples.pop()
            samples.append((headers[-1], line))
    if not headers:
        raise UserError(f"{path} holds no health of a job; 'fp8doctor run --health FILE train.py' writes one")
    return Health(path.name, tuple(headers), tuple(samples), tuple(bad), torn)


def _lines(text: bytes) -> Iterator[Line | None]:
    """Yield the lines; None for one that cannot be read."""
    decode = decoder(Line)
    for line in text.split(b"\n"):
        if line.strip():
            try:
                yield decode.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield None


def last_step(path: Path) -> int:
    """Return the last step that a file holds; 0 for a new file."""
    try:
        return max(read_health(path).steps, default=0)
    except UserError:
        return 0


def header(script: str, every: int | None, step: int, layers: Sequence[HealthLayer], **more: Any) -> Header:
    """Make a header of this version."""
    return Header(FORMAT, VERSION, script, every, step, tuple(layers), **more)
