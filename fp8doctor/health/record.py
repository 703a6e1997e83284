"""Records of FP8's health and their file: JSON lines, appended one by one.

A header is written when the job starts and after each restart, then a line per sampled step. Each line is one
write to a file opened for appending: a killed process leaves whole lines and at most one torn one.
"""

import math
import os
from pathlib import Path

import msgspec

from fp8doctor.errors import UserError
from fp8doctor.facts.record import decoder
from fp8doctor.files import regular
from fp8doctor.version import VERSION

FORMAT = 1
"""Version of the file's format. Fields are added at the end, never renamed."""

OPERANDS = ("input", "weight", "gradient")
"""Tensors that a layer casts: its input, its weight, the gradient of its output."""


class CastHealth(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The numbers of one cast of one tensor; None if unknown."""

    sqnr_db: float | None = None
    """Power of the tensor / power of the rounding error, in dB; None if the error is zero."""
    saturated_pct: float | None = None
    """Elements beyond the largest number of the FP8 type, in percent of all."""
    flushed_pct: float | None = None
    """Elements that became zero, in percent of those that are not zero."""
    amax: float | None = None
    """Largest magnitude; None if not finite."""
    used: float | None = None
    """Largest magnitude / the largest that the scale in use can hold; None if the tensor itself gives the
    scale. Above 1 it saturates."""
    of_history: float | None = None
    """Largest magnitude / the largest in the layer's amax history; None without a history."""
    non_finite: int | None = None
    """Elements that are not finite, of those that were counted."""
    typical_db: float | None = None
    """Ratio of the row in the middle, in dB; None if it is exact, or zero."""

    @property
    def lowest_db(self) -> float | None:
        """Return the lower of the two ratios; 0 if something is not finite."""
        known = [db for db in (self.sqnr_db, self.typical_db) if db is not None]
        return 0.0 if self.non_finite else min(known, default=None)


Row = tuple[CastHealth | None, CastHealth | None, CastHealth | None]
"""Of one layer, in the order of `OPERANDS`."""


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

    script: str
    every: int | None
    """Steps between samples; None if the sampler chooses."""
    step: int
    """Step after which this process began to sample."""
    layers: tuple[HealthLayer, ...]
    format: int = FORMAT
    version: str = VERSION
    torch: str | None = None
    device: str | None = None


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """One sampled step."""

    step: int
    loss: float | None
    """The loss that the backward passes started from, summed over micro-batches; None if unknown or not
    finite."""
    gradient_norm: float | None
    """Norm of all gradients of this process, before clipping."""
    layers: tuple[Row, ...]
    """In the order of the header's."""
    cost_ms: float | None = None
    """Time that the sample added to its step."""
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
    """Appends lines to a file, after the end of a torn one. Raises `UserError`."""

    def __init__(self, path: Path) -> None:
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


def significant(number: float) -> float | None:
    """Round a number to five digits; None if it is not finite."""
    return float(f"{number:.5g}") if math.isfinite(number) else None


class Health(msgspec.Struct, frozen=True):
    """The content of a file."""

    name: str
    headers: tuple[Header, ...]
    samples: tuple[tuple[Header, Sample], ...]
    """In the order of steps. A restarted job replaces the samples after its checkpoint."""
    first_bad: tuple[FirstBad, ...] = ()

    @property
    def layers(self) -> dict[str, HealthLayer]:
        return {layer.name: layer for header in self.headers for layer in header.layers}

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(sample.step for _, sample in self.samples)

    def series(self) -> dict[tuple[str, str], list[tuple[int, CastHealth]]]:
        """List each cast of each layer over the sampled steps."""
        found: dict[tuple[str, str], list[tuple[int, CastHealth]]] = {}
        for header, sample in self.samples:
            for layer, casts in zip(header.layers, sample.layers, strict=False):
                for operand, cast in zip(OPERANDS, casts, strict=True):
                    if cast is not None:
                        found.setdefault((layer.name, operand), []).append((sample.step, cast))
        return found

    def lowest_db(self) -> dict[str, dict[int, float]]:
        """Return the lowest ratio of each layer's tensors, in dB, by step."""
        found: dict[str, dict[int, float]] = {}
        for (layer, _), series in self.series().items():
            by_step = found.setdefault(layer, {})
            for step, cast in series:
                if (db := cast.lowest_db) is not None:
                    by_step[step] = min(db, by_step.get(step, db))
        return {name: found[name] for name in self.layers if found.get(name)}


def read_health(path: Path) -> Health:
    """Read a file. Raises `UserError` if it holds no health of a job."""
    decode = decoder(Line)
    headers: list[Header] = []
    samples: list[tuple[Header, Sample]] = []
    bad: list[FirstBad] = []
    try:
        regular(path)
        with path.open("rb") as lines:
            for text in lines:
                try:
                    line = decode.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue  # torn
                if isinstance(line, Header):
                    headers.append(line)
                elif isinstance(line, FirstBad):
                    bad.append(line)
                elif headers:
                    while samples and samples[-1][1].step >= line.step:
                        samples.pop()
                    samples.append((headers[-1], line))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if not headers:
        raise UserError(f"{path} holds no health of a job; 'fp8doctor run --health FILE train.py' writes one")
    if headers[-1].format > FORMAT:
        raise UserError(f"{path} was written by fp8doctor {headers[-1].version}, newer than {VERSION}")
    return Health(path.name, tuple(headers), tuple(samples), tuple(bad))


def last_step(path: Path) -> int:
    """Return the last step that a file holds; 0 for a new file."""
    try:
        return max(read_health(path).steps, default=0)
    except UserError:
        return 0
