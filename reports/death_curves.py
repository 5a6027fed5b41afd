"""Figures of where drafts die: by position in the draft, and by how far back a needle stands."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bdcore.collapse import Estimate
from reports.deaths import Deaths
from reports.figures import MAX_PANELS
from reports.looks import look, wrapped
from reports.needles import QUARTERS, Needles
from reports.panels import legend_beside, panel_row
from reports.svg import Drawing, draw


@dataclass(frozen=True)
class _Curve:
    """Acceptance of one drafter and view, in one panel."""

    panel: str
    corpus: str
    label: str
    points: list[tuple[float, float]]


def position_curves(deaths: Sequence[Deaths]) -> Drawing | None:
    """Acceptance by position in the draft, one panel per workload and corpus, one line per drafter and view."""
    curves = [
        _Curve(
            f"{d.by.split(', ', 1)[1]}\n{d.corpus}, {d.context} tokens",
            d.corpus,
            _view(d),
            _known((g.label, g.acceptance) for g in d.groups if isinstance(g.label, int)),
        )
        for d in deaths
        if isinstance(d.groups[0].label, int)
    ]
    if not curves:
        return None
    figure, told = _drawn(curves, "position in the draft", "acceptance, all before accepted")
    return draw(
        figure,
        name="positions",
        title="Where in a round drafts die",
        alt="Line chart. " + "; ".join(told) + ".",
        caption="Share of the drafts put to the test at a position that the verifier accepts, at the longest context "
        + "and the largest gamma. A level line: every draft is as good as the first. Intervals: see the table.",
    )


def needle_curves(needles: Sequence[Needles]) -> Drawing | None:
    """Acceptance by the distance of the needle, one panel per workload and context, one line per drafter and view."""
    shortest = min((n.gamma for n in needles if n.gamma), default=None)
    curves = [
        _Curve(
            f"{n.workload}, gamma {n.gamma}\n{n.corpus}, {n.context} tokens",
            n.corpus,
            _view(n),
            _known((100 * (r.quarter + 0.5) / QUARTERS, r.acceptance) for r in n.reaches if r.quarter is not None),
        )
        for n in needles
        if n.gamma == shortest
    ]
    if not any(len(curve.points) > 1 for curve in curves):
        return None
    figure, told = _drawn(curves, "distance (% of the prompt)", "acceptance (share of drafted)")
    return draw(
        figure,
        name="needles",
        title="Acceptance by the distance of the needle",
        alt="Line chart. " + "; ".join(told) + ".",
        caption="Prompts that ask for a number hidden in their text, by the quarter of the prompt in which it stands, "
        + "the newest first, at the smallest gamma. Intervals, and answers found: see the table.",
    )


def _view(one: Deaths | Needles) -> str:
    view = "full cache" if one.budget < 0 else f"budget {one.budget}, {one.policy}, {one.position_mode}"
    return wrapped(f"{one.name}, {view}")


def _known(points: Iterable[tuple[float, Estimate]]) -> list[tuple[float, float]]:
    return [(x, estimate.value) for x, estimate in points if estimate.value is not None]


def _drawn(curves: Sequence[_Curve], xlabel: str, ylabel: str) -> tuple[Figure, list[str]]:
    """The figure, and what each of its lines says in words."""
    panels = list(dict.fromkeys(curve.panel for curve in curves))[:MAX_PANELS]
    lines = list(dict.fromkeys(curve.label for curve in curves))
    figure, axes = panel_row(len(panels))
    told: list[str] = []
    for ax, panel in zip(axes, panels, strict=True):
        for curve in (c for c in curves if c.panel == panel):
            xs, ys = zip(*curve.points, strict=True) if curve.points else ((), ())
            ax.plot(xs, ys, markersize=4.5, linewidth=1.5, label=curve.label, **look(lines.index(curve.label)))
            said = ", ".join(f"{y:.2f} at {x:g}" for x, y in curve.points)
            told.append(f"{curve.corpus}, {curve.label}: {said}")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel(xlabel)
        ax.set_title(panel)
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel(ylabel)
    legend_beside(figure, axes)
    return figure, told
