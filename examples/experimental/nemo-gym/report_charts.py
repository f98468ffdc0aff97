"""Charts of a report as SVG elements that take font and colours from the page they stand in, light or dark.

Needs matplotlib. Nothing that a server sent goes in here: a chart has numbers and this file's own words, and what its
colours stand for the page says beside it, as text. The same numbers give the same bytes.
"""

import io
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from task_selection import Band

# Stand-ins for the page's colours, which are known only where the page is shown.
_COLOURS = {
    "ink": "#010101",
    "muted": "#010102",
    "line": "#010103",
    "train": "#010104",
    "too_hard": "#010105",
    "too_easy": "#010106",
    **{f"s{number}": f"#0102{number:02x}" for number in range(8)},
}
SERIES = tuple(f"s{number}" for number in range(8))

_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # what is measured with; the page sets its own
    "font.size": 9.5,
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "grid.color": _COLOURS["line"],
    "grid.linewidth": 0.6,
    "xtick.color": _COLOURS["muted"],
    "ytick.color": _COLOURS["muted"],
    "xtick.labelcolor": _COLOURS["muted"],
    "ytick.labelcolor": _COLOURS["muted"],
    "ytick.left": False,
}
_INCHES = (5.2, 2.7)
_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10800, 36000)


def durations(seconds: Mapping[str, Sequence[float]]) -> str:
    """Histogram of how long episodes took, of one scan or of several above each other, over a logarithmic axis.

    Args:
        seconds: those of each scan, by its colour: a name of ``SERIES``.
    """
    values = [max(value, 0.05) for of_scan in seconds.values() for value in of_scan]
    low, high = math.log10(min(values)), math.log10(max(values))
    low, high = (low - 0.2, high + 0.2) if high - low < 0.4 else (low, high)
    edges = [10 ** (low + (high - low) * step / 32) for step in range(33)]
    with _Chart("durations") as chart:
        axes = chart.axes
        for series, of_scan in seconds.items():
            clipped = [min(max(value, edges[0]), edges[-1]) for value in of_scan]
            _histogram(axes, clipped, edges, series)
        axes.set_xscale("log")
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _SECONDS if edges[0] <= tick <= edges[-1]]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _as_time(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", bottom=False)
        _label(axes, x="time of an episode", y="episodes")
        return chart.svg()


def solve_rates(rates: Mapping[str, Sequence[float]], band: Band, *, passes: int) -> str:
    """How many tasks have which solve rate, with the band that is worth training on behind it.

    Args:
        rates: of the tasks of each scan, from 0 to 1, by its colour: a name of ``SERIES``.
        band: what is marked. The bars of one scan alone have the colours of what to do with their tasks.
        passes: of the scan; as many steps there are, 20 at most.
    """
    steps = min(passes, 20)
    with _Chart("solve_rates") as chart:
        axes = chart.axes
        axes.axvspan(band.lowest, band.highest, color=_COLOURS["train"], alpha=0.12, linewidth=0)
        width = 0.72 / steps / len(rates)
        for number, (series, of_scan) in enumerate(rates.items()):
            counts = Counter(round(rate * steps) for rate in of_scan)
            shift = (number - (len(rates) - 1) / 2) * width
            for place, count in sorted(counts.items()):
                name = series if len(rates) > 1 else _name_in(band, place / steps)
                axes.bar(place / steps + shift, count, width=width * 0.94, color=_COLOURS[name], linewidth=0)
        axes.set_xlim(-0.6 / steps, 1 + 0.6 / steps)
        axes.margins(y=0.16)
        axes.text(
            *((band.lowest + band.highest) / 2, 0.98, "worth training on"),
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            color=_COLOURS["train"],
            fontweight="bold",
        )
        axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        _label(axes, x="episodes that solved the task", y="tasks")
        return chart.svg()


def lines(series: Sequence[Mapping[int, float]], *, y: str) -> str:
    """Values over steps, a line each; every step is a point where there are few."""
    with _Chart(f"lines {y}") as chart:
        axes = chart.axes
        for name, points in zip(SERIES, series, strict=False):
            marker = "o" if len(points) <= 40 else ""
            axes.plot(list(points), list(points.values()), color=_COLOURS[name], lw=1.8, marker=marker, ms=3.5)
        values = [value for points in series for value in points.values()]
        if values and 0 <= min(values) and max(values) <= 1:
            axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label(axes, x="step", y=y)
        return chart.svg()


def stacked(series: Sequence[Mapping[int, float]], *, y: str) -> str:
    """Counts over steps, on top of each other."""
    steps = sorted({step for points in series for step in points})
    with _Chart(f"stacked {y}") as chart:
        axes = chart.axes
        below = [0.0] * len(steps)
        for name, points in zip(SERIES, series, strict=False):
            heights = [points.get(step, 0.0) for step in steps]
            axes.bar(steps, heights, bottom=below, width=0.86, color=_COLOURS[name], linewidth=0)
            below = [height + under for height, under in zip(heights, below, strict=True)]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label(axes, x="step", y=y)
        return chart.svg()


class _Chart:
    """Axes in the page's style, and what is drawn on them as an SVG element."""

    def __init__(self, name: str) -> None:
        # The salt makes ids that are the same each time and differ between the charts of a page.
        self._context = matplotlib.rc_context({**_STYLE, "svg.hashsalt": name})

    def __enter__(self) -> "_Chart":
        self._context.__enter__()
        self._figure = Figure(figsize=_INCHES, layout="constrained")
        self.axes = self._figure.add_subplot()
        self.axes.grid(axis="y")
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)

    def svg(self) -> str:
        file = io.StringIO()
        self._figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        for name, colour in _COLOURS.items():
            text = text.replace(colour, f"var(--{name})")
        return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'aria-hidden="true"', text, count=1)


def _name_in(band: Band, rate: float) -> str:
    return "too_hard" if rate < band.lowest else "too_easy" if rate > band.highest else "train"


def _histogram(axes: Axes, values: Sequence[float], edges: Sequence[float], series: str) -> None:
    colour = _COLOURS[series]
    axes.hist(values, bins=list(edges), color=colour, alpha=0.35, linewidth=0)
    axes.hist(values, bins=list(edges), histtype="step", color=colour, linewidth=1.4)


def _label(axes: Axes, *, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", fontsize=9.5, color=_COLOURS["muted"])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=y != "mean reward"))


def _as_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:g} s"
    return f"{seconds / 60:g} min" if seconds < 3600 else f"{seconds / 3600:g} h"
