"""Training loss against step, as a figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reports.looks import PALETTE
from reports.panels import legend_beside, panel_row
from reports.svg import Drawing, draw

MAX_POINTS = 400


def training_loss(training: Mapping[str, Sequence[Mapping[str, Any]]]) -> Drawing | None:
    """Training loss against step, one panel per drafter: L_A (full prefix cache) and L_C (sparse)."""
    curves = {
        name: {key: _series(rows, key) for key in ("loss_a", "loss_c")} for name, rows in training.items() if rows
    }
    curves = {name: pair for name, pair in curves.items() if any(len(steps) for steps, _ in pair.values())}
    if not curves:
        return None
    figure, axes = panel_row(len(curves))
    told = []
    for ax, (name, pair) in zip(axes, curves.items(), strict=True):
        for (key, (steps, losses)), colour in zip(pair.items(), PALETTE, strict=False):
            if len(steps):
                label = {"loss_a": "L_A, full cache", "loss_c": "L_C, sparse cache"}[key]
                smooth = _running_mean(losses, max(1, len(losses) // 20))
                # A point per step would make the file of a long run megabytes.
                some = np.unique(np.linspace(0, len(steps) - 1, MAX_POINTS).astype(int))
                steps, losses, smooth = steps[some], losses[some], smooth[some]
                ax.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
                ax.plot(
                    steps, smooth, color=colour, linewidth=1.7, label=label, linestyle="-" if key == "loss_a" else "--"
                )
                told.append(
                    f"{name}, {label}: {smooth[0]:.2f} at step {steps[0]:g}, {smooth[-1]:.2f} at step {steps[-1]:g}"
                )
        ax.set_title(name)
        ax.set_xlabel("step")
    axes[0].set_ylabel("loss (nats per token)")
    legend_beside(figure, axes)
    return draw(
        figure,
        name="training-loss",
        title="Training loss",
        alt="Line chart. " + "; ".join(told) + ".",
        caption=f"Thin: logged steps, at most {MAX_POINTS} of them. Bold: running mean over a twentieth of all steps.",
    )


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None and np.isfinite(row[key])]
    table = np.array(sorted(pairs), dtype=float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _running_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over the last `width` values, over fewer at the start."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
