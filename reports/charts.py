"""Figures of the analysis: what swaps give back, speed against the draft length, memory, where speculation pays.

Those of where drafts die are in `reports.death_curves`.
"""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bdcore.collapse import Estimate
from reports.analysis import Analysis
from reports.breakeven import Worth
from reports.death_curves import needle_curves, position_curves
from reports.figures import MAX_PANELS
from reports.looks import PALETTE, look, wrapped
from reports.measured import Measured
from reports.panels import budget_label, heat_map, legend_beside, panel_row
from reports.svg import INK, Drawing, draw, style
from reports.swaps import Swaps
from reports.upper import upper_curves

TITLE_WIDTH = 60
"""Characters over a bar chart whose labels take a third of the figure."""


def analysis_figures(cells: Sequence[Measured], analysis: Analysis) -> list[Drawing]:
    """Every figure the rows allow; one without a measured value is left out."""
    with style():
        made = [
            upper_curves(analysis.upper),
            attribution_bars(analysis.swaps),
            position_curves(analysis.deaths),
            needle_curves(analysis.needles),
            gamma_curves(cells),
            memory_curve(cells),
            break_even_map(analysis.worth),
        ]
    return [drawing for drawing in made if drawing is not None]


def attribution_bars(swaps: Sequence[Swaps]) -> Drawing | None:
    """Points of acceptance that each swap gives back, one panel per drafter and budget, the loss on top."""
    shown = [s for s in swaps if s.found.lost.value is not None][:MAX_PANELS]
    if not shown:
        return None
    titles = ["\n".join(wrapped(line, TITLE_WIDTH) for line in s.title.split(": ", 1)) for s in shown]
    heights = [0.34 * (len(s.found.swaps) + 1) + 0.8 + 0.17 * t.count("\n") for s, t in zip(shown, titles, strict=True)]
    figure = Figure(figsize=(8.2, sum(heights)))
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights).ravel().tolist()
    told: list[str] = []
    for ax, one, title in zip(axes, shown, titles, strict=True):
        bars = [("lost", one.found.lost), *((s.name, s.gained) for s in one.found.swaps)]
        bars = [(name, estimate) for name, estimate in bars if estimate.value is not None]
        for y, (name, estimate) in enumerate(bars):
            colour = PALETTE[-1] if name == "lost" else PALETTE[0]
            ax.barh(y, 100 * (estimate.value or 0.0), color=colour, height=0.66, alpha=0.85)
            if estimate.low is not None and estimate.high is not None:
                ax.hlines(y, 100 * estimate.low, 100 * estimate.high, color=INK, linewidth=1.5)
            told.append(f"{one.title}, {name}: {100 * (estimate.value or 0.0):+.1f} points")
        ax.set_yticks(range(len(bars)), [name for name, _ in bars])
        ax.invert_yaxis()
        ax.axvline(0, color="#808080", linewidth=1.2)
        ax.set_xlabel("acceptance (points)")
        ax.set_title(title, loc="left")
    return draw(
        figure,
        name="attribution",
        title="What lost acceptance is due to",
        alt="Bars. " + "; ".join(told) + ".",
        caption="Grey: acceptance lost. Blue: what one change of the setting gives back, on the same documents. Lines "
        + "through the bars: 95 % paired bootstrap intervals. Shares need not add up: causes overlap.",
    )


def gamma_curves(cells: Sequence[Measured]) -> Drawing | None:
    """Decode speedup against the draft length, one panel per context, one line per method and budget."""
    timed = [c for c in cells if c.row["gamma"] > 0 and c.decode_speedup.value is not None]
    if len({c.row["gamma"] for c in timed}) < 2:
        return None
    scene = timed[0].scene
    timed = [c for c in timed if c.scene == scene]
    lines = sorted({(c.name, c.row["budget"]) for c in timed}, key=lambda key: (key[0], key[1] < 0, key[1]))
    return _lines(
        [(f"{context} tokens", [c for c in timed if c.row["context"] == context]) for context in _contexts(timed)],
        lines,
        lambda c: c.row["gamma"],
        lambda c: c.decode_speedup,
        name="gamma",
        title="Decode speedup against the draft length" + (f": {scene}" if scene else ""),
        xlabel="gamma (tokens drafted per round)",
        ylabel="decode speedup (x)",
        caption="1 is the verifier alone. Whiskers: 95 % bootstrap intervals over prompts.",
        level=1.0,
    )


def memory_curve(cells: Sequence[Measured]) -> Drawing | None:
    """Acceptance against the bytes of the drafter's cache, one panel per context, one line per method."""
    kept = [
        c for c in cells if c.row["gamma"] > 0 and c.row["drafter_kv_bytes_peak"] and c.acceptance.value is not None
    ]
    if len({c.row["budget"] for c in kept}) < 2:
        return None
    scene, gamma = kept[0].scene, min(c.row["gamma"] for c in kept)
    kept = [c for c in kept if c.scene == scene and c.row["gamma"] == gamma]
    contexts = _contexts(kept)
    contexts = [contexts[0], contexts[-1]] if len(contexts) > 1 else contexts
    return _lines(
        [(f"{context} tokens", [c for c in kept if c.row["context"] == context]) for context in contexts],
        sorted({(c.name, None) for c in kept}),
        lambda c: c.row["drafter_kv_bytes_peak"] / 2**20,
        lambda c: c.acceptance,
        name="memory",
        title="Acceptance against the drafter's cache" + (f": {scene}" if scene else ""),
        xlabel="drafter KV peak (MiB)",
        ylabel="acceptance (share of drafted)",
        caption=f"One point per budget, the full cache last; gamma {gamma}. Whiskers: 95 % bootstrap intervals.",
        level=None,
    )


def _contexts(cells: Sequence[Measured]) -> list[int]:
    return sorted({c.row["context"] for c in cells})[:MAX_PANELS]


def _lines(
    panels: Sequence[tuple[str, Sequence[Measured]]],
    lines: Sequence[tuple[str, int | None]],
    x_of: Callable[[Measured], float],
    y_of: Callable[[Measured], Estimate],
    *,
    name: str,
    title: str,
    xlabel: str,
    ylabel: str,
    caption: str,
    level: float | None,
) -> Drawing:
    figure, axes = panel_row(len(panels))
    told: list[str] = []
    for ax, (panel, cells) in zip(axes, panels, strict=True):
        for i, (method, budget) in enumerate(lines):
            here = [c for c in cells if c.name == method and budget in (None, c.row["budget"])]
            told += _line(ax, sorted(here, key=x_of), x_of, y_of, i, method, budget, panel)
        if level is not None:
            ax.axhline(level, color="#808080", linewidth=1.2, zorder=1)
        ax.set_xscale("log", base=2)
        places = sorted({x_of(c) for c in cells})
        ax.set_xticks(places, [f"{place:.3g}" for place in places], rotation=45 if len(places) > 5 else 0)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel(xlabel)
        ax.set_title(panel)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel(ylabel)
    legend_beside(figure, axes)
    return draw(figure, name=name, title=title, alt="Line chart. " + "; ".join(told) + ".", caption=caption)


def _line(
    ax: Axes,
    cells: Sequence[Measured],
    x_of: Callable[[Measured], float],
    y_of: Callable[[Measured], Estimate],
    i: int,
    method: str,
    budget: int | None,
    panel: str,
) -> list[str]:
    if not cells:
        return []
    label = method if budget is None else f"{method}, {'full cache' if budget < 0 else f'budget {budget}'}"
    xs, ys = [x_of(c) for c in cells], [y_of(c) for c in cells]
    ax.plot(xs, [y.value for y in ys], markersize=5, linewidth=1.6, label=label, **look(i))
    bounds = [(x, y.low, y.high) for x, y in zip(xs, ys, strict=True) if y.low is not None]
    ax.vlines([b[0] for b in bounds], [b[1] for b in bounds], [b[2] for b in bounds], color=look(i)["color"], alpha=0.4)
    return [f"{panel}, {label}: " + ", ".join(f"{y.value:.2f} at {x:.3g}" for x, y in zip(xs, ys, strict=True))]


def break_even_map(worth: Sequence[Worth]) -> Drawing | None:
    """Expected decode speedup at the best draft length as context x budget, one map per method and setting."""
    names = list(dict.fromkeys((w.scene, w.method) for w in worth))[:MAX_PANELS]
    groups = [[w for w in worth if (w.scene, w.method) == key] for key in names]
    if not groups:
        return None
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    deep = max(len({w.budget for w in g}) for g in groups)
    figure = Figure(figsize=(3.5 * columns + 0.8, (0.5 * deep + 1.5) * rows))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    told: list[str] = []
    for ax, group in zip(axes, groups, strict=False):
        told += _map(ax, group)
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    return draw(
        figure,
        name="break-even",
        title="Where speculation pays: expected decode speedup at the best draft length",
        alt="Heat map. " + "; ".join(told) + ".",
        caption="From measured acceptance by position and measured costs. Above 1 speculation pays; in brackets the "
        + "best gamma, 0 where the verifier alone is fastest. Several settings of one budget: the best of them.",
    )


def _map(ax: Axes, group: Sequence[Worth]) -> list[str]:
    best: dict[tuple[int, int], Worth] = {}
    for one in group:
        place = one.context, one.budget
        best[place] = max((w for w in (best.get(place), one) if w), key=_fastest)
    told = [
        f"{w.method}, {context} x {budget_label(budget)}: {_fastest(w):.2f}, gamma {w.best}"
        for (context, budget), w in best.items()
    ]
    fields = {place: (_fastest(w), f"{_fastest(w):.2f} ({w.best})") for place, w in best.items()}
    heat_map(ax, fields, low=0.5, high=1.5)
    ax.set_title(f"{group[0].method}\n{group[0].scene}")
    return told


def _fastest(found: Worth) -> float:
    """Expected speedup at the best draft length that is not 0."""
    return max(value for gamma, value in found.predicted.items() if gamma)
