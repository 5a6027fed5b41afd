"""The upper envelope: is a drafter, in every cell, as good as the best that was measured there without it?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bdcore.collapse import MIN_PROMPTS, Estimate
from bdcore.collapse.pairing import difference, pooled
from bdcore.schema import FULL_BUDGET
from reports.figures import MAX_PANELS
from reports.looks import DASHES, look, wrapped
from reports.panels import budget_label, context_axis, legend_beside, panel_row
from reports.series import SCENE, Series, aligned, grouped, plain, scene_of
from reports.svg import Drawing, draw

_TRAINED = "budgetdraft"


@dataclass(frozen=True)
class Upper:
    """One cell of a trained drafter beside the best of the others, over the documents that both drafted on."""

    drafter: str
    scene: str
    context: int
    budget: int
    setting: str
    gamma: int
    acceptance: Estimate
    best: str
    """The other drafter and its setting."""
    best_acceptance: Estimate
    gap: Estimate
    """Acceptance minus that of the best, paired."""
    verdict: str
    """`above` and `below`: the whole interval of the gap; `within`: it holds 0; `insufficient`."""


def upper_envelope(series: Sequence[Series]) -> list[Upper]:
    """Of every trained drafter, against all other drafters at the same budget, in any setting, or with the full cache.

    At the smallest gamma. The best of several is the luckiest of them too, which makes `below` a little too likely.
    """
    drafting = plain(series)
    gamma = min((s["gamma"] for s in drafting), default=0)
    names = (*SCENE, "context", "gamma_mode")
    return [
        found
        for _, group in grouped([s for s in drafting if s["gamma"] == gamma], names)
        for mine in group
        if mine["method"] == _TRAINED and (found := _beside(mine, group))
    ]


def _beside(mine: Series, group: Iterable[Series]) -> Upper | None:
    others = [
        (s, *aligned(mine.acceptance, s.acceptance))
        for s in group
        if s["drafter_name"] != mine["drafter_name"] and s["budget"] in (mine["budget"], FULL_BUDGET)
    ]
    measured = [(pooled(theirs), s, ours, theirs) for s, ours, theirs in others]
    measured = [m for m in measured if m[0].value is not None]
    if not measured:
        return None
    best_acceptance, best, ours, theirs = max(measured, key=lambda m: m[0].value or 0.0)
    gap = difference(ours, theirs)
    return Upper(
        mine["drafter_name"],
        scene_of(mine),
        mine["context"],
        mine["budget"],
        _view(mine),
        mine["gamma"],
        pooled(ours),
        f"{best['drafter_name']}, {_view(best)}",
        best_acceptance,
        gap,
        _verdict(gap),
    )


def _view(series: Series) -> str:
    if series["budget"] == FULL_BUDGET:
        return "full cache"
    refreshed = f", refresh {series['refresh']}" if series["refresh"] else ""
    return f"{series['policy']}, {series['position_mode']}{refreshed}"


def _verdict(gap: Estimate) -> str:
    if gap.n < MIN_PROMPTS or gap.value is None:
        return "insufficient"
    if gap.low is None or gap.high is None:
        return "within" if gap.value == 0 else "insufficient"
    return "above" if gap.low > 0 else "below" if gap.high < 0 else "within"


def upper_curves(found: Sequence[Upper]) -> Drawing | None:
    """Acceptance against context, one panel per drafter, scene and setting: its lines, and the best without it."""
    full = [u for u in found if u.budget == FULL_BUDGET]
    sparse = [u for u in found if u.budget != FULL_BUDGET]
    panels = list(dict.fromkeys((u.drafter, u.scene, u.setting) for u in sparse or full))[:MAX_PANELS]
    if not panels:
        return None
    figure, axes = panel_row(len(panels))
    budgets = sorted({u.budget for u in found}, key=lambda b: (b < 0, b))
    told: list[str] = []
    for ax, (drafter, scene, setting) in zip(axes, panels, strict=True):
        here = [u for u in found if (u.drafter, u.scene) == (drafter, scene) and u.setting in (setting, "full cache")]
        for i, budget in enumerate(budgets):
            line = sorted((u for u in here if u.budget == budget), key=lambda u: u.context)
            drawn, dotted = ({**look(i), "linestyle": dash, "markersize": 4.5} for dash in (DASHES[0], DASHES[3]))
            label, xs = f"budget {budget_label(budget)}", [u.context for u in line]
            ax.plot(xs, [100 * (u.acceptance.value or 0) for u in line], label=label, **drawn)
            best = [100 * (u.best_acceptance.value or 0) for u in line]
            ax.plot(xs, best, label=f"{label}: best without", alpha=0.7, **dotted)
            told += [f"{drafter}, {label}, {u.context} tokens: {u.verdict} the best of the others" for u in line]
        context_axis(ax, sorted({u.context for u in here}))
        ax.set_title(wrapped(f"{drafter}, {scene}, {setting}"))
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("acceptance (% of drafted)")
    legend_beside(figure, axes)
    return draw(
        figure,
        name="upper-envelope",
        title="The upper envelope",
        alt="Line chart. " + "; ".join(told) + ".",
        caption="Solid: the trained drafter. Dotted: the best of all other drafters at that budget, in any policy and "
        + "position mode, or with the full cache. Verdicts with paired intervals: see the table.",
    )
