"""Where decoding time goes, as a figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from reports.looks import wrapped
from reports.measured import Measured
from reports.panels import budget_label
from reports.svg import Drawing, draw

PHASES = {"draft_s": "draft", "select_s": "select", "verify_s": "verify", "overhead_s": "overhead"}
PHASE_COLOURS = ("#d55e00", "#a67c00", "#0d7dc4", "#6f8796")


def phase_shares(cells: Sequence[Measured]) -> Drawing | None:
    """Where decoding time goes: one bar per method and budget, at the shortest and the longest context."""
    timed = [c for c in cells if sum(c.row[p] or 0.0 for p in PHASES) > 0]
    if not timed:
        return None
    scene, gamma = timed[0].scene, min((c.row["gamma"] for c in timed if c.row["gamma"] > 0), default=0)
    timed = [c for c in timed if c.scene == scene and c.row["gamma"] in (0, gamma)]
    contexts = sorted({c.row["context"] for c in timed})
    contexts = [contexts[0], contexts[-1]] if len(contexts) > 1 else contexts
    bars = max(sum(c.row["context"] == context for c in timed) for context in contexts)
    lines = 1 + max(_bar(c).count("\n") for c in timed)
    size = (3.6 * len(contexts) + 1.6, (0.18 + 0.16 * lines) * bars + 1.5)
    figure = Figure(figsize=size)
    axes = figure.subplots(1, len(contexts), squeeze=False).ravel().tolist()
    told = []
    for ax, context in zip(axes, contexts, strict=True):
        told += _bars(ax, [c for c in timed if c.row["context"] == context])
        ax.set_title(f"{context} tokens")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PHASES))
    where = ", ".join(part for part in (scene, f"gamma {gamma}" if gamma else "") if part)
    return draw(
        figure,
        name="phases",
        title="Decode time by phase",
        alt="Stacked bars. " + "; ".join(told) + ".",
        caption=f"Shares of decode seconds, summed over prompts, without prefill{f' ({where})' if where else ''}.",
    )


def _bar(cell: Measured) -> str:
    return cell.name if cell.row["gamma"] == 0 else wrapped(f"{cell.name}, {budget_label(cell.row['budget'])}")


def _bars(ax: Axes, cells: Sequence[Measured]) -> list[str]:
    names = [_bar(c) for c in cells]
    seconds = np.array([[c.row[phase] or 0.0 for phase in PHASES] for c in cells])
    shares = seconds / seconds.sum(axis=1, keepdims=True)
    left = np.zeros(len(cells))
    for i, (label, colour) in enumerate(zip(PHASES.values(), PHASE_COLOURS, strict=True)):
        ax.barh(range(len(cells)), shares[:, i], left=left, label=label, color=colour, height=0.72)
        left += shares[:, i]
    ax.set_yticks(range(len(cells)), names)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f}"))
    ax.set_xlabel("share of decode time (%)")
    ax.grid(visible=False)
    parts = [
        ", ".join(f"{label} {share:.0%}" for label, share in zip(PHASES.values(), row, strict=True)) for row in shares
    ]
    plain = [name.replace("\n", " ") for name in names]
    return [f"{cells[0].row['context']} tokens, {name}: {part}" for name, part in zip(plain, parts, strict=True)]
