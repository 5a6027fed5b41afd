"""Verdicts in words: where acceptance collapses with context, and whether the budget matters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from bdcore.collapse.boundary import Point, doubt, fall, skipped
from bdcore.collapse.cells import Cell, places, series, title, usable
from bdcore.collapse.intervals import MIN_PROMPTS
from bdcore.collapse.words import budget_name, percent

SHARE = 0.5


@dataclass(frozen=True)
class Collapse:
    """Where one series over context falls below a share of its acceptance at the shortest context."""

    method: str
    budget: int
    gamma: int
    setting: str
    status: str
    """`collapsed`: the whole interval is below; `likely`: the point alone; `not reached`; `insufficient`."""
    boundary: int | None
    """Smallest context below the bound, in tokens."""
    certain_from: int | None
    """Smallest context whose whole interval is below the bound, in tokens."""
    retained: float | None
    """Lowest acceptance over the longer contexts, as a share of that at the shortest one."""
    sentence: str


@dataclass(frozen=True)
class BudgetEffect:
    """Whether acceptance differs between the budgets of one method at one context."""

    method: str
    context: int
    gamma: int
    setting: str
    status: str
    """`no effect`: one value lies in every interval; `effect`; `insufficient`."""
    spread: float | None
    """(highest - lowest) / mean acceptance over the budgets."""
    sentence: str


@dataclass(frozen=True)
class Headline:
    """One sentence for all series of a method."""

    method: str
    status: str
    sentence: str


def collapse_boundaries(
    cells: Iterable[Cell], *, share: float = SHARE, min_prompts: int = MIN_PROMPTS
) -> list[Collapse]:
    """One verdict per method, setting, budget and gamma. Methods that draft nothing (gamma 0) have none."""
    return [_boundary(found, share, min_prompts) for found in series(cells)]


def _boundary(cells: Sequence[Cell], share: float, min_prompts: int) -> Collapse:
    cell, points = cells[0], [Point(c.context, c.acceptance) for c in cells]
    used = [p for p in points if usable(p.estimate, min_prompts)]
    reason = _too_little(points, used, min_prompts)
    if reason:
        return _collapse(cell, "insufficient", f"cannot be judged: {reason}.")
    first, *longer = used
    found = fall(longer, share * first.value)
    at, sure, left_out = found.below, found.certain and found.certain.context, skipped(points, used)
    retained = found.lowest.value / first.value
    if at is None:
        lowest = _against(found.lowest, first)
        text = f"does not collapse up to {used[-1].context} tokens: at its lowest {lowest}.{left_out}"
        return _collapse(cell, "not reached", text, retained=retained)
    where = f"at {at.context} tokens: {_against(at, first)}, below {100 * share:.0f} % of it"
    if sure == at.context:
        return _collapse(cell, "collapsed", f"collapses {where}.{left_out}", at.context, sure, retained)
    later = f" It is certain at {sure} tokens." if sure else ""
    text = f"has likely collapsed {where}, but {doubt(at)}.{later}{left_out}"
    return _collapse(cell, "likely", text, at.context, sure, retained)


def _too_little(points: Sequence[Point], used: Sequence[Point], min_prompts: int) -> str:
    first = points[0]
    if len(points) < 2:
        return f"only one context, {first.context} tokens, was measured: {percent(first.estimate)}"
    if first not in used:
        return (
            f"{first.estimate.n} of the {min_prompts} prompts needed at {first.context} tokens, the shortest context"
            f" ({'; '.join(f'{p.context} tokens: {percent(p.estimate)}' for p in points)})"
        )
    if len(used) < 2:
        return f"no context but {first.context} tokens ({percent(first.estimate)}) has {min_prompts} prompts or more"
    if not first.value:
        return f"acceptance is already 0 at {first.context} tokens, the shortest context"
    return ""


def _against(point: Point, first: Point) -> str:
    return (
        f"acceptance is {percent(point.estimate)} at {point.context} tokens"
        f" against {percent(first.estimate)} at {first.context}"
    )


def _collapse(
    cell: Cell,
    status: str,
    text: str,
    boundary: int | None = None,
    certain: int | None = None,
    retained: float | None = None,
) -> Collapse:
    sentence = f"{title(cell, budget=True)}: {text}"
    return Collapse(cell.method, cell.budget, cell.gamma, cell.setting, status, boundary, certain, retained, sentence)


def budget_effects(cells: Iterable[Cell], *, min_prompts: int = MIN_PROMPTS) -> list[BudgetEffect]:
    """One verdict per method, setting, gamma and context that was measured at two budgets or more.

    From the intervals of cells alone. Where documents are at hand, `budget_sensitivity` asks the sharper, paired one.
    """
    return [_effect(group, min_prompts) for group in places(cells) if len(group) > 1]


def _effect(group: Sequence[Cell], min_prompts: int) -> BudgetEffect:
    first, used = group[0], [c for c in group if usable(c.acceptance, min_prompts)]
    name = f"{title(first, budget=False)}, {first.context} tokens"
    if reason := _unjudged(group, used, min_prompts):
        counts = ", ".join(f"budget {budget_name(c.budget)}: {percent(c.acceptance)}" for c in group)
        text = f"{name}: the effect of the budget cannot be judged {reason} ({counts})."
        return BudgetEffect(first.method, first.context, first.gamma, first.setting, "insufficient", None, text)
    lowest, highest = min(used, key=_value), max(used, key=_value)
    mean = sum(map(_value, used)) / len(used)
    spread = (_value(highest) - _value(lowest)) / mean if mean else None
    same = max(map(_low, used)) <= min(map(_high, used))
    text = f"{name}: {_effect_words(same, lowest, highest, spread)}"
    status = "no effect" if same else "effect"
    return BudgetEffect(first.method, first.context, first.gamma, first.setting, status, spread, text)


def _unjudged(group: Sequence[Cell], used: Sequence[Cell], min_prompts: int) -> str:
    """Why budgets cannot be set beside each other, or an empty string. Prompts that all agree are no certainty."""
    if len(used) < len(group):
        return f"with fewer than {min_prompts} prompts"
    differ = len({c.acceptance.value for c in group}) > 1
    return "without an interval at every budget" if differ and any(c.acceptance.low is None for c in group) else ""


def _effect_words(same: bool, lowest: Cell, highest: Cell, spread: float | None) -> str:
    share = "" if spread is None else f" (range / mean {100 * spread:.1f} %)"
    low, high = percent(lowest.acceptance), percent(highest.acceptance)
    if same and lowest.acceptance.value == highest.acceptance.value:
        return f"budget has no effect: acceptance is {low} at every budget{share}."
    ends = f"from {low} at budget {budget_name(lowest.budget)} to {high} at budget {budget_name(highest.budget)}{share}"
    return f"budget has no effect within the intervals: {ends}." if same else f"acceptance differs by budget: {ends}."


def _value(cell: Cell) -> float:
    return cell.acceptance.value or 0.0


def _low(cell: Cell) -> float:
    """Without an interval all budgets have the same value."""
    return _value(cell) if cell.acceptance.low is None else cell.acceptance.low


def _high(cell: Cell) -> float:
    return _value(cell) if cell.acceptance.high is None else cell.acceptance.high


_WORST_FIRST = {
    "collapsed": "collapses",
    "likely": "has likely collapsed",
    "insufficient": "cannot be judged",
    "not reached": "does not collapse",
}


def headlines(verdicts: Iterable[Collapse]) -> list[Headline]:
    """One sentence per method over its series: how many collapse, and the first or weakest of them in full."""
    ordered = sorted(verdicts, key=lambda v: v.method)
    return [_headline(method, list(group)) for method, group in groupby(ordered, key=lambda v: v.method)]


def _headline(method: str, verdicts: Sequence[Collapse]) -> Headline:
    counts = {status: sum(v.status == status for v in verdicts) for status in _WORST_FIRST}
    worst = next(status for status in _WORST_FIRST if counts[status])
    telling = min((v for v in verdicts if v.status == worst), key=_telling)
    if len(verdicts) == 1:
        return Headline(method, worst, telling.sentence)
    parts = [f"{_WORST_FIRST[status]} in {count}" for status, count in counts.items() if count]
    text = f"{method} {', '.join(parts)} of {len(verdicts)} series (one per setting, budget and gamma)."
    kind = {"collapsed": "Earliest", "likely": "Earliest", "insufficient": "For example", "not reached": "Weakest"}[
        worst
    ]
    return Headline(method, worst, f"{text} {kind}: {telling.sentence}")


def _telling(verdict: Collapse) -> tuple[int, float]:
    return verdict.boundary or 0, 0.0 if verdict.retained is None else verdict.retained
