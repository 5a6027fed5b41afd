"""Parts that figures share: panels in rows, a legend beside them, a map of context x budget."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

_LINE, _GAP = 0.167, 0.0625
"""Inches that a line of a legend takes, and the space between two entries."""


def budget_label(budget: int) -> str:
    """`full` for -1."""
    return "full" if budget < 0 else str(budget)


def panel_row(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, at most three beside each other, that share the vertical axis."""
    columns = min(count, 3)
    rows = -(-count // columns)
    width = {1: 5.4, 2: 4.1, 3: 3.3}[columns]
    figure = Figure(figsize=(width * columns + 2.6, 3.2 * rows + 0.4))
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def legend_beside(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for all panels, each label once."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend(figure, found)


def legend(figure: Figure, found: Mapping[str, Any]) -> None:
    """Label -> handle, beside the panels. The figure grows where the legend would not fit into its height."""
    figure.legend(list(found.values()), list(found), loc="outside right upper", handlelength=3.2)
    lines = sum(label.count("\n") + 1 for label in found)
    figure.set_figheight(max(figure.get_figheight(), _LINE * lines + _GAP * (len(found) + 2)))


def context_axis(ax: Axes, contexts: Sequence[int]) -> None:
    """Contexts (tokens) on a scale of powers of two, each with its number."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(contexts, [str(c) for c in contexts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("context (tokens)")
    if len(contexts) == 1:
        ax.set_xlim(contexts[0] / 2, contexts[0] * 2)


def heat_map(ax: Axes, fields: Mapping[tuple[int, int], tuple[float, str]], *, low: float, high: float) -> None:
    """(context, budget) -> (value, what the field says); an absent field stays empty. Colours from `low` to `high`."""
    contexts = sorted({context for context, _ in fields})
    budgets = sorted({budget for _, budget in fields}, key=lambda b: (b < 0, b))
    values = np.full((len(budgets), len(contexts)), np.nan)
    places = {(budgets.index(budget), contexts.index(context)): field for (context, budget), field in fields.items()}
    for place, (value, _) in places.items():
        values[place] = value
    ax.pcolormesh(values, cmap="cividis", vmin=low, vmax=high, edgecolors="none")
    for (y, x), (value, text) in sorted(places.items()):
        # The colour map is dark up to about its middle.
        ink = "#ffffff" if value < low + 0.55 * (high - low) else "#000000"
        ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink)
    ax.set_xticks(np.arange(len(contexts)) + 0.5, [str(c) for c in contexts])
    ax.set_yticks(np.arange(len(budgets)) + 0.5, [budget_label(b) for b in budgets])
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel("budget (keys)")
    ax.grid(visible=False)
