"""The figures of a report, from measured cells. Cells are only ever drawn beside cells of the same draft length."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bdcore.collapse import Estimate
from bdcore.schema import SELF
from reports.looks import DASHES, MARKERS, PALETTE, wrapped
from reports.measured import Measured
from reports.panels import budget_label, context_axis, heat_map, legend_beside, panel_row
from reports.phases import phase_shares
from reports.svg import Drawing, draw, style
from reports.training_curves import training_loss

MAX_PANELS = 6
CEILING = {"color": "#808080", "linewidth": 1.2, "markersize": 3.5, "alpha": 0.8, "zorder": 1}
"""Look of the verifier under a drafter's view: the curves of drafters lie below it, as far as they use their view."""


def all_figures(cells: Sequence[Measured], training: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Drawing]:
    """Every figure the cells allow, in reading order: one without a single measured value is left out."""
    with style():
        made = [
            acceptance_curves(cells),
            acceptance_heat(cells),
            speedup_curves(cells),
            phase_shares(cells),
            training_loss(training),
        ]
    return [drawing for drawing in made if drawing is not None]


def is_ceiling(row: Mapping[str, Any]) -> bool:
    """Whether the verifier drafts for itself in this cell."""
    return row["drafter_name"] == SELF


def acceptance_curves(cells: Sequence[Measured]) -> Drawing | None:
    """Acceptance against context, one line per method and budget, under the ceilings that were measured."""
    return _curves(
        cells,
        lambda c: c.acceptance,
        name="acceptance",
        title="Acceptance against context",
        ylabel="acceptance (% of drafted)",
        percent=True,
    )


def speedup_curves(cells: Sequence[Measured]) -> Drawing | None:
    """Decode speedup against context, one line per method and budget; 1 is the verifier alone."""
    return _curves(
        cells,
        lambda c: c.decode_speedup,
        name="decode-speedup",
        title="Decode speedup against context",
        ylabel="decode speedup (x)",
        percent=False,
    )


def _curves(
    cells: Sequence[Measured],
    pick: Callable[[Measured], Estimate],
    *,
    name: str,
    title: str,
    ylabel: str,
    percent: bool,
) -> Drawing | None:
    drawn = [c for c in cells if c.row["gamma"] > 0 and pick(c).value is not None]
    if not drawn:
        return None
    panels, note = _panels(drawn)
    looks = _looks(drawn)
    figure, grid = panel_row(len(panels))
    told: list[str] = []
    for ax, panel in zip(grid, panels, strict=True):
        for key in [key for key in looks if any(_line(c) == key for c in panel[1])]:
            line = sorted((c for c in panel[1] if _line(c) == key), key=lambda c: c.row["context"])
            _plot(ax, line, [pick(c) for c in line], looks[key])
            told.append(_told(panel[0], line, pick, percent))
        ax.set_title(panel[0])
        context_axis(ax, sorted({c.row["context"] for c in panel[1]}))
        if percent:
            ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
        else:
            ax.axhline(1.0, color="#808080", linewidth=1.2, zorder=1)
    grid[0].set_ylim(bottom=0)  # once all panels are drawn: they share the axis, and this fixes its top
    grid[0].set_ylabel(ylabel)
    legend_beside(figure, grid)
    one = "" if percent else " 1 is the verifier alone."
    if percent and any(is_ceiling(c.row) for c in drawn):
        one = " Grey: the verifier under the same view, a practical ceiling."
    caption = f"Lines: ratios of sums over prompts; bands: 95 % bootstrap intervals, where defined.{one}{note}"
    return draw(figure, name=name, title=title, alt="Line chart. " + "; ".join(told) + ".", caption=caption)


def _panels(cells: Sequence[Measured]) -> tuple[list[tuple[str, list[Measured]]], str]:
    """Cells by scene and gamma; with too many of them, each scene's smallest gamma, and a note that says so."""
    keys = list(dict.fromkeys((c.scene, c.row["gamma"]) for c in cells))
    keys.sort()
    note = ""
    if len(keys) > MAX_PANELS:
        keys = [(scene, min(g for s, g in keys if s == scene)) for scene in dict.fromkeys(s for s, _ in keys)]
        note = " Shown at the smallest draft length; the summary table has all."
    if len(keys) > MAX_PANELS:
        keys, note = keys[:MAX_PANELS], f"{note} The first {MAX_PANELS} settings are shown."
    panels = [
        (f"{s}, gamma {g}" if s else f"gamma {g}", [c for c in cells if (c.scene, c.row["gamma"]) == (s, g)])
        for s, g in keys
    ]
    return panels, note


def _line(cell: Measured) -> tuple[str, int]:
    return cell.name, cell.row["budget"]


def _looks(cells: Sequence[Measured]) -> dict[tuple[str, int], dict[str, Any]]:
    """Colour by method, dash and marker by budget: a line is known by more than its colour."""
    names = sorted({c.name for c in cells if not is_ceiling(c.row)})
    budgets = sorted({c.row["budget"] for c in cells})  # -1, the full cache, first: it gets the solid line
    keys = sorted({_line(c) for c in cells}, key=lambda key: (key[0], key[1] < 0, key[1]))
    return {
        (name, budget): {
            **(CEILING if name not in names else {"color": PALETTE[names.index(name) % len(PALETTE)]}),
            "linestyle": DASHES[budgets.index(budget) % len(DASHES)],
            "marker": MARKERS[budgets.index(budget) % len(MARKERS)],
            "label": wrapped(
                f"{'ceiling: ' if name not in names else ''}{name}, "
                f"{'full cache' if budget < 0 else f'budget {budget}'}"
            ),
        }
        for name, budget in keys
    }


def _plot(ax: Axes, line: Sequence[Measured], estimates: Sequence[Estimate], look: Mapping[str, Any]) -> None:
    contexts = [c.row["context"] for c in line]
    ax.plot(contexts, [e.value for e in estimates], **{"markersize": 5, "linewidth": 1.6, **look})
    low = np.array([np.nan if e.low is None else e.low for e in estimates])
    high = np.array([np.nan if e.high is None else e.high for e in estimates])
    if len(line) > 1:
        ax.fill_between(contexts, low, high, color=look["color"], alpha=0.13, linewidth=0)
    else:
        ax.vlines(contexts, low, high, color=look["color"], alpha=0.5)


def _told(panel: str, line: Sequence[Measured], pick: Callable[[Measured], Estimate], percent: bool) -> str:
    def number(value: float | None) -> str:
        return "undefined" if value is None else f"{100 * value:.1f} %" if percent else f"{value:.2f} x"

    points = ", ".join(f"{number(pick(c).value)} at {c.row['context']} tokens" for c in line)
    return f"{panel}, {line[0].name}, budget {budget_label(line[0].row['budget'])}: {points}"


def acceptance_heat(cells: Sequence[Measured]) -> Drawing | None:
    """Acceptance as context x budget, one map per method, each scene at its smallest gamma."""
    drawn = [c for c in cells if c.row["gamma"] > 0 and c.acceptance.value is not None]
    smallest = {c.scene: min(o.row["gamma"] for o in drawn if o.scene == c.scene) for c in drawn}
    drawn = [c for c in drawn if c.row["gamma"] == smallest[c.scene]]
    keys = list(dict.fromkeys((c.scene, c.name) for c in drawn))
    if not keys:
        return None
    columns = min(len(keys), 3)
    rows = -(-len(keys) // columns)
    budgets = max(len({c.row["budget"] for c in drawn if (c.scene, c.name) == key}) for key in keys)
    titles = [
        wrapped(", ".join(part for part in (name, scene, f"gamma {smallest[scene]}") if part)) for scene, name in keys
    ]
    height = 0.5 * budgets + 1.0 + 0.2 * max(title.count("\n") + 1 for title in titles)
    figure = Figure(figsize=(3.3 * columns + 0.8, height * rows + 0.3))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    told = []
    for ax, (scene, name), title in zip(axes, keys, titles, strict=False):
        group = [c for c in drawn if (c.scene, c.name) == (scene, name)]
        _heat(ax, group)
        ax.set_title(title)
        told += [
            f"{name}, {c.row['context']} x {budget_label(c.row['budget'])}: {c.acceptance.value:.0%}" for c in group
        ]
    for unused in axes[len(keys) :]:
        unused.set_axis_off()
    return draw(
        figure,
        name="acceptance-heat",
        title="Acceptance by context and budget (%)",
        alt="Heat map. " + "; ".join(told) + ".",
        caption="Each map at the smallest draft length of its setting. An empty field was not measured.",
    )


def _heat(ax: Axes, cells: Sequence[Measured]) -> None:
    values = {(c.row["context"], c.row["budget"]): c.acceptance.value or 0.0 for c in cells}
    heat_map(ax, {place: (value, f"{100 * value:.0f}") for place, value in values.items()}, low=0.0, high=1.0)
