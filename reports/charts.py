"""Figures of the analysis: what swaps give back, speed against the draft length, memory, where speculation pays."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from bdcore.collapse import Estimate
from reports.breakeven import Worth
from reports.figures import DASHES, MARKERS, MAX_PANELS, PALETTE
from reports.measured import Measured
from reports.svg import Drawing, draw, style
from reports.swaps import Swaps


def analysis_figures(cells: Sequence[Measured], swaps: Sequence[Swaps], worth: Sequence[Worth]) -> list[Drawing]:
    """Every figure the rows allow; one without a measured value is left out."""
    with style():
        made = [attribution_bars(swaps), gamma_curves(cells), memory_curve(cells), break_even_map(worth)]
    return [drawing for drawing in made if drawing is not None]


def attribution_bars(swaps: Sequence[Swaps]) -> Drawing | None:
    """Points of acceptance that each swap gives back, one panel per drafter and budget, the loss on top."""
    shown = [s for s in swaps if s.found.lost.value is not None][:MAX_PANELS]
    if not shown:
        return None
    heights = [0.34 * (len(s.found.swaps) + 1) + 1.1 for s in shown]
    figure = Figure(figsize=(8.2, sum(heights)), layout="constrained")
    axes = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights).ravel().tolist()
    told: list[str] = []
    for ax, one in zip(axes, shown, strict=True):
        bars = [("lost", one.found.lost), *((s.name, s.gained) for s in one.found.swaps)]
        bars = [(name, estimate) for name, estimate in bars if estimate.value is not None]
        for y, (name, estimate) in enumerate(bars):
            colour = PALETTE[-1] if name == "lost" else PALETTE[0]
            ax.barh(y, 100 * (estimate.value or 0.0), color=colour, height=0.66, alpha=0.85)
            if estimate.low is not None and estimate.high is not None:
                ax.hlines(y, 100 * estimate.low, 100 * estimate.high, color="#808080", linewidth=2.2)
            told.append(f"{one.title}, {name}: {100 * (estimate.value or 0.0):+.1f} points")
        ax.set_yticks(range(len(bars)), [name for name, _ in bars])
        ax.invert_yaxis()
        ax.axvline(0, color="#808080", linewidth=1.2)
        ax.set_xlabel("acceptance (points)")
        ax.set_title(one.title.replace(": ", "\n", 1), loc="left")
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
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns + 2.4, 3.1 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel().tolist()
    told: list[str] = []
    for ax, (panel, cells) in zip(axes, panels, strict=False):
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
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel(ylabel)
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(found.values()), list(found), loc="outside right upper", handlelength=3.2)
    figure.suptitle(title)
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
    look = {
        "color": PALETTE[i % len(PALETTE)],
        "linestyle": DASHES[i % len(DASHES)],
        "marker": MARKERS[i % len(MARKERS)],
    }
    ax.plot(xs, [y.value for y in ys], markersize=5, linewidth=1.6, label=label, **look)
    bounds = [(x, y.low, y.high) for x, y in zip(xs, ys, strict=True) if y.low is not None]
    ax.vlines([b[0] for b in bounds], [b[1] for b in bounds], [b[2] for b in bounds], color=look["color"], alpha=0.4)
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
    figure = Figure(figsize=(3.5 * columns + 0.8, (0.5 * deep + 1.5) * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    told: list[str] = []
    for ax, group in zip(axes, groups, strict=False):
        told += _map(ax, group)
    for unused in axes[len(groups) :]:
        unused.set_axis_off()
    figure.suptitle("Where speculation pays: expected decode speedup at the best draft length")
    return draw(
        figure,
        name="break-even",
        title="Where speculation pays",
        alt="Heat map. " + "; ".join(told) + ".",
        caption="From measured acceptance by position and measured costs. Above 1 speculation pays; in brackets the "
        + "best gamma, 0 where the verifier alone is fastest. Several settings of one budget: the best of them.",
    )


def _map(ax: Axes, group: Sequence[Worth]) -> list[str]:
    contexts = sorted({w.context for w in group})
    budgets = sorted({w.budget for w in group}, key=lambda b: (b < 0, b))
    values, told = np.full((len(budgets), len(contexts)), np.nan), list[str]()
    for (y, budget), (x, context) in ((a, b) for a in enumerate(budgets) for b in enumerate(contexts)):
        here = [w for w in group if (w.budget, w.context) == (budget, context)]
        if here:
            best = max(here, key=lambda w: max(v for g, v in w.predicted.items() if g))
            values[y, x] = max(v for g, v in best.predicted.items() if g)
            ink = "#ffffff" if values[y, x] < 1.0 else "#000000"
            ax.text(x + 0.5, y + 0.5, f"{values[y, x]:.2f} ({best.best})", ha="center", va="center", color=ink)
            name = "full" if budget < 0 else str(budget)
            told.append(f"{best.method}, {context} x {name}: {values[y, x]:.2f}, gamma {best.best}")
    ax.pcolormesh(values, cmap="cividis", vmin=0.5, vmax=1.5, edgecolors="none")
    ax.set_xticks(np.arange(len(contexts)) + 0.5, [str(c) for c in contexts])
    ax.set_yticks(np.arange(len(budgets)) + 0.5, ["full" if b < 0 else str(b) for b in budgets])
    ax.set_xlabel("context (tokens)")
    ax.set_ylabel("budget (keys)")
    ax.set_title(f"{group[0].method}\n{group[0].scene}")
    ax.grid(visible=False)
    return told
