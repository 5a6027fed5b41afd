"""Figures of several drafters: acceptance against context and against budget, one line per drafter, with bands."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from bdcore.schema import SELF
from reports.envelope import drafters
from reports.looks import DASHES, MARKERS, PALETTE
from reports.panels import legend
from reports.svg import Drawing, draw, style

Row = Mapping[str, Any]
Panel = tuple[str, Sequence[Row]]

BANDS = "Lines: ratios of sums over documents; bands: 95 % bootstrap intervals over documents, where defined."


def all_curves(rows: Sequence[Row]) -> list[Drawing]:
    """Per workload, draft length and corpus: acceptance against context; per workload and draft length: against budget.

    `rows` are those of `reports.envelope.envelope`.
    """
    drawn = [row for row in rows if row["acceptance"] is not None]
    scenes = sorted({(row["workload"], row["gamma"]) for row in drawn})
    with style():
        return [drawing for scene in scenes for drawing in _scene(drawn, *scene)]


def _scene(rows: Sequence[Row], workload: str, gamma: int) -> list[Drawing]:
    here = [row for row in rows if (row["workload"], row["gamma"]) == (workload, gamma)]
    looks = _looks(rows)  # of all rows: a drafter looks the same in every figure
    corpora = sorted({row["corpus"] for row in here})
    over_context = [_against_context(here, corpus, workload, gamma, looks) for corpus in corpora]
    return [*over_context, _against_budget(here, workload, gamma, looks)]


def _against_context(
    rows: Sequence[Row], corpus: str, workload: str, gamma: int, looks: Mapping[Any, dict[str, Any]]
) -> Drawing:
    """One row of panels per policy and position mode, one panel per budget; the full cache stands in every row."""
    here = [row for row in rows if row["corpus"] == corpus]
    budgets = sorted({row["budget"] for row in here}, key=lambda b: (b < 0, b))
    panels = [
        [
            (_title(budget, mode), [r for r in here if r["budget"] == budget and (budget < 0 or _mode(r) == mode)])
            for budget in budgets
        ]
        for mode in _modes(here)
    ]
    return _figure(
        panels,
        looks,
        "context",
        name=_slug("acceptance-context", workload, corpus, f"gamma{gamma}"),
        title=f"Acceptance against context: {workload} on {corpus}, gamma {gamma}",
        caption=BANDS,
    )


def _against_budget(rows: Sequence[Row], workload: str, gamma: int, looks: Mapping[Any, dict[str, Any]]) -> Drawing:
    """One row of panels per corpus, one panel per policy and position mode, at the longest context of the corpus."""
    panels: list[list[Panel]] = []
    for corpus in sorted({row["corpus"] for row in rows}):
        here = [row for row in rows if row["corpus"] == corpus]
        longest = max(row["context"] for row in here)
        there = [row for row in here if row["context"] == longest]
        panels.append(
            [
                (f"{corpus}, {longest} tokens\n{mode}", [r for r in there if r["budget"] < 0 or _mode(r) == mode])
                for mode in _modes(rows)
            ]
        )
    return _figure(
        panels,
        looks,
        "budget",
        name=_slug("acceptance-budget", workload, f"gamma{gamma}"),
        title=f"Acceptance against budget at the longest context: {workload}, gamma {gamma}",
        caption=BANDS,
    )


def _mode(row: Row) -> str:
    return f"{row['policy']}, {row['position_mode']}"


def _modes(rows: Sequence[Row]) -> list[str]:
    """Policies with position modes of the sparse caches; the full cache alone where there are none."""
    return sorted({_mode(row) for row in rows if row["budget"] > 0}) or ["full cache"]


def _title(budget: int, mode: str) -> str:
    return "full cache" if budget < 0 else f"budget {budget}\n{mode}"


def _slug(*parts: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _looks(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Any]]:
    """Colour, dash and marker of every drafter and seed: a line is known by more than its colour."""
    seeds = {row["seed"] for row in rows}
    lines = [
        (name, seed)
        for name in drafters(rows)
        for seed in sorted({row["seed"] for row in rows if row["drafter"] == name})
    ]
    return {
        (name, seed): {
            "color": "#808080" if name == SELF else PALETTE[i % len(PALETTE)],
            "linestyle": DASHES[(i + i // len(PALETTE)) % len(DASHES)],
            "marker": MARKERS[i % len(MARKERS)],
            "label": _label(name, f", seed {seed}" if len(seeds) > 1 else ""),
        }
        for i, (name, seed) in enumerate(lines)
    }


def _label(name: str, seed: str) -> str:
    return f"ceiling: the verifier{seed}" if name == SELF else f"{name}{seed}"


def _figure(
    panels: Sequence[Sequence[Panel]],
    looks: Mapping[Any, dict[str, Any]],
    over: str,
    *,
    name: str,
    title: str,
    caption: str,
) -> Drawing:
    """A grid of panels with one scale. `over`: the column of the x axis, `context` or `budget`."""
    height, width = len(panels), max(map(len, panels))
    figure = Figure(figsize=(2.5 * width + 2.4, 2.4 * height + 0.8))
    axes = figure.subplots(height, width, sharex=True, sharey=True, squeeze=False)
    every = [row for line in panels for _, rows in line for row in rows]
    positions = _axis(axes[0, 0], sorted({row[over] for row in every}, key=lambda v: (v < 0, v)), over)
    told: list[str] = []
    for y, line in enumerate(panels):
        for x, (heading, rows) in enumerate(line):
            told += _panel(axes[y, x], heading, rows, looks, lambda row: positions[row[over]])
    for ax in axes[-1]:
        ax.set_xlabel({"context": "context (tokens)", "budget": "budget (keys per layer and head)"}[over])
    for ax in axes[:, 0]:
        ax.set_ylabel("acceptance (% of drafted)")
    axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    axes[0, 0].set_ylim(bottom=0)
    found = {t: h for ax in axes.flat for h, t in zip(*ax.get_legend_handles_labels(), strict=True)}
    order = [look["label"] for look in looks.values() if look["label"] in found]
    legend(figure, {text: found[text] for text in order})
    return draw(figure, name=name, title=title, alt="Line charts. " + "; ".join(told) + ".", caption=caption)


def _axis(ax: Axes, values: Sequence[int], over: str) -> dict[int, float]:
    """Where each value stands: contexts on a scale of powers of two, budgets evenly with the full cache last."""
    if over == "context":
        ax.set_xscale("log", base=2)
        places = {value: float(value) for value in values}
    else:
        places = {value: float(i) for i, value in enumerate(values)}
    labels = ["full" if value < 0 else str(value) for value in values]
    ax.set_xticks(list(places.values()), labels)
    ax.xaxis.set_minor_locator(NullLocator())
    if len(values) == 1:
        ax.set_xlim(places[values[0]] / 2 - 1, places[values[0]] * 2 + 1)
    return places


def _panel(
    ax: Axes,
    heading: str,
    rows: Sequence[Row],
    looks: Mapping[Any, dict[str, Any]],
    place: Callable[[Row], float],
) -> list[str]:
    ax.set_title(heading)
    told: list[str] = []
    for (name, seed), look in looks.items():
        line = sorted((r for r in rows if (r["drafter"], r["seed"]) == (name, seed)), key=place)
        if line:
            x = [place(row) for row in line]
            ax.plot(x, [row["acceptance"] for row in line], markersize=4.5, linewidth=1.5, **look)
            low, high = (np.array([np.nan if r[end] is None else r[end] for r in line]) for end in ("lo", "hi"))
            if len(line) > 1:
                ax.fill_between(x, low, high, color=look["color"], alpha=0.13, linewidth=0)
            else:
                ax.vlines(x, low, high, color=look["color"], alpha=0.5)
            told.append(f"{heading}, {look['label']}: {_points(line)}".replace("\n", ", "))
    return told


def _points(line: Sequence[Row]) -> str:
    return ", ".join(f"{100 * r['acceptance']:.1f} % at {r['context']} tokens, {_keys(r['budget'])}" for r in line)


def _keys(budget: int) -> str:
    return "full cache" if budget < 0 else f"budget {budget}"
