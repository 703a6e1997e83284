"""The charts of a page as a figure of matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from fp8doctor.diagnosis.document import Document
from fp8doctor.errors import UserError
from fp8doctor.facts import if_recorded
from fp8doctor.render import charts
from fp8doctor.render.charts import Chart, Segment
from fp8doctor.render.terminal import printable_line
from fp8doctor.render.timing import timing
from fp8doctor.render.words import NOT_PROFILED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = ("#0b83b4", "#3d5bd9", "#cf5a16", "#8b3fd9", "#66707c", "#87919d")
"""Colours of the columns of the table, which are those of the page in light."""

OTHERS = {"whole": "#6b7786", "cost": "#cf4437", "saving": "#1f8a5b"}
"""Kind of a segment -> its colour."""

INCHES_WIDE, INCHES_A_BAR, INCHES_A_CHART = 9.0, 0.32, 0.9


def plot(report: Document) -> Figure:
    """Draw where the step goes, and what its difference from BF16 is made of.

    Raises `UserError` in a sentence if matplotlib is not installed or nothing was timed.
    """
    try:
        figure_class = _figure_class()
    except ImportError:
        raise UserError(
            "report.plot() needs matplotlib, which is not installed: pip install matplotlib"
        ) from None
    found = if_recorded(timing, report.facts)
    steps = charts.steps(found)
    if steps is None:
        raise UserError("there is nothing to plot: no step was timed")
    drawn = (steps, *charts.differences(found))
    heights = [INCHES_A_CHART + INCHES_A_BAR * len(chart.bars) for chart in drawn]
    figure = figure_class(figsize=(INCHES_WIDE, sum(heights)), layout="constrained")
    axes = figure.subplots(len(drawn), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for chart, (at,) in zip(drawn, axes, strict=True):
        _draw(chart, at)
    return figure


def _figure_class() -> type[Figure]:
    """Make a figure that a notebook shows even if nobody imported pyplot."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            picture = io.BytesIO()
            self.savefig(picture, format="png")
            return picture.getvalue()

    return ShownFigure


def _draw(chart: Chart, axes: Axes) -> None:
    from matplotlib.patches import Patch

    for row, bar in enumerate(chart.bars):
        for each in bar.segments:
            height = 0.35 if each.name == NOT_PROFILED else 0.75
            axes.barh(row, each.length_ms, left=each.start_ms, height=height, color=_colour(each))
    axes.set_yticks(range(len(chart.bars)), [_plain(f"{bar.label}: {bar.value}") for bar in chart.bars])
    axes.invert_yaxis()
    axes.set_xlim(0, chart.full_ms * 1.02)
    axes.set_title(_plain(chart.title), loc="left", fontsize="medium")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if chart.legend:
        named = [Patch(color=_colour(each), label=each.name) for each in chart.legend]
        axes.legend(
            handles=named,
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.12),
            ncols=len(named),
            handlelength=1,
            columnspacing=1,
            frameon=False,
            fontsize="small",
        )


def _colour(segment: Segment) -> str:
    return PARTS[segment.number] if segment.kind == "part" else OTHERS[segment.kind]


def _plain(text: str) -> str:
    """Write text that matplotlib does not read as mathematics."""
    return printable_line(text).replace("$", r"\$")
