"""Verdicts in words: where acceptance collapses with context, and whether the budget matters.

Only cells of one method, one setting and one gamma are ever compared: acceptance falls with gamma by arithmetic alone,
and that is no collapse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from bdcore.collapse.intervals import Estimate

SHARE = 0.5
# Of n ** n equally likely resamples one repeats the lowest prompt n times. For n = 3 that is 3.7 %, more than the 2.5 %
# an interval leaves out at each end: the interval would be the plain range of the prompts.
MIN_PROMPTS = 4
FULL_BUDGET = -1


@dataclass(frozen=True)
class Cell:
    """Acceptance of one method at one context (tokens) and budget (keys per layer and head, -1 = full)."""

    method: str
    context: int
    budget: int
    gamma: int
    acceptance: Estimate
    setting: str = ""
    """Whatever else must be equal before two cells may be compared (corpus, workload, drafter, ...), as a label."""


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


def budget_name(budget: int) -> str:
    """`full` for -1."""
    return "full" if budget == FULL_BUDGET else str(budget)


def percent(estimate: Estimate) -> str:
    """`61.0 % (55.2 to 66.1, n = 8)`; says so where there is no interval."""
    if estimate.value is None:
        return f"undefined (n = {estimate.n})"
    if estimate.low is None or estimate.high is None:
        return f"{100 * estimate.value:.1f} % (no interval, n = {estimate.n})"
    bounds = f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f}"
    return f"{100 * estimate.value:.1f} % ({bounds}, n = {estimate.n})"


def collapse_boundaries(
    cells: Iterable[Cell], *, share: float = SHARE, min_prompts: int = MIN_PROMPTS
) -> list[Collapse]:
    """One verdict per method, setting, budget and gamma. Methods that draft nothing (gamma 0) have none."""
    drafting = sorted((c for c in cells if c.gamma > 0), key=_series_key)
    return [_boundary(list(series), share, min_prompts) for _, series in groupby(drafting, key=_series)]


def _series(cell: Cell) -> tuple[str, str, int, int]:
    return cell.method, cell.setting, cell.budget, cell.gamma


def _series_key(cell: Cell) -> tuple[str, str, bool, int, int, int]:
    return cell.method, cell.setting, cell.budget == FULL_BUDGET, cell.budget, cell.gamma, cell.context


def _name(cell: Cell, *, budget: bool) -> str:
    parts = [cell.method, cell.setting, f"budget {budget_name(cell.budget)}" if budget else "", f"gamma {cell.gamma}"]
    return ", ".join(part for part in parts if part)


def _usable(cell: Cell, min_prompts: int) -> bool:
    return cell.acceptance.value is not None and cell.acceptance.n >= min_prompts


def _boundary(series: Sequence[Cell], share: float, min_prompts: int) -> Collapse:
    first, used = series[0], [c for c in series if _usable(c, min_prompts)]
    reason = _too_little(series, used, min_prompts)
    if reason:
        return _collapse(first, "insufficient", f"cannot be judged: {reason}.")
    bound = share * _value(first)
    below = [c for c in used[1:] if _value(c) < bound]
    certain = [c for c in below if c.acceptance.high is not None and c.acceptance.high < bound]
    skipped = _skipped(series, used)
    lowest = min(used[1:], key=_value)
    retained = _value(lowest) / _value(first)
    if not below:
        text = f"does not collapse up to {used[-1].context} tokens: at its lowest {_against(lowest, first)}.{skipped}"
        return _collapse(first, "not reached", text, retained=retained)
    at, sure = below[0], certain[0].context if certain else None
    found = f"at {at.context} tokens: {_against(at, first)}, below {100 * share:.0f} % of it"
    if sure == at.context:
        return _collapse(first, "collapsed", f"collapses {found}.{skipped}", at.context, sure, retained)
    doubt = "there is no interval" if at.acceptance.high is None else "the interval reaches above it"
    later = f" It is certain at {sure} tokens." if sure else ""
    text = f"has likely collapsed {found}, but {doubt}.{later}{skipped}"
    return _collapse(first, "likely", text, at.context, sure, retained)


def _too_little(series: Sequence[Cell], used: Sequence[Cell], min_prompts: int) -> str:
    first = series[0]
    if len(series) < 2:
        return f"only one context, {first.context} tokens, was measured: {percent(first.acceptance)}"
    if first not in used:
        return (
            f"{first.acceptance.n} of the {min_prompts} prompts needed at {first.context} tokens, the shortest context"
            f" ({'; '.join(f'{c.context} tokens: {percent(c.acceptance)}' for c in series)})"
        )
    if len(used) < 2:
        return f"no context but {first.context} tokens ({percent(first.acceptance)}) has {min_prompts} prompts or more"
    if not first.acceptance.value:
        return f"acceptance is already 0 at {first.context} tokens, the shortest context"
    return ""


def _against(cell: Cell, first: Cell) -> str:
    return (
        f"acceptance is {percent(cell.acceptance)} at {cell.context} tokens"
        f" against {percent(first.acceptance)} at {first.context}"
    )


def _skipped(series: Sequence[Cell], used: Sequence[Cell]) -> str:
    left_out = [str(c.context) for c in series if c not in used]
    return f" Too few prompts to judge {', '.join(left_out)} tokens." if left_out else ""


def _collapse(
    first: Cell,
    status: str,
    text: str,
    boundary: int | None = None,
    certain: int | None = None,
    retained: float | None = None,
) -> Collapse:
    sentence = f"{_name(first, budget=True)}: {text}"
    return Collapse(
        first.method, first.budget, first.gamma, first.setting, status, boundary, certain, retained, sentence
    )


def budget_effects(cells: Iterable[Cell], *, min_prompts: int = MIN_PROMPTS) -> list[BudgetEffect]:
    """One verdict per method, setting, gamma and context that was measured at two budgets or more."""
    drafting = sorted((c for c in cells if c.gamma > 0), key=lambda c: (*_place(c), c.budget == FULL_BUDGET, c.budget))
    groups = [list(group) for _, group in groupby(drafting, key=_place)]
    return [_effect(group, min_prompts) for group in groups if len(group) > 1]


def _place(cell: Cell) -> tuple[str, str, int, int]:
    return cell.method, cell.setting, cell.gamma, cell.context


def _effect(group: Sequence[Cell], min_prompts: int) -> BudgetEffect:
    first, used = group[0], [c for c in group if _usable(c, min_prompts)]
    name = f"{_name(first, budget=False)}, {first.context} tokens"
    if len(used) < len(group):
        counts = ", ".join(f"budget {budget_name(c.budget)}: {percent(c.acceptance)}" for c in group)
        text = f"{name}: the effect of the budget cannot be judged with fewer than {min_prompts} prompts ({counts})."
        return BudgetEffect(first.method, first.context, first.gamma, first.setting, "insufficient", None, text)
    lowest, highest = min(used, key=_value), max(used, key=_value)
    mean = sum(map(_value, used)) / len(used)
    spread = (_value(highest) - _value(lowest)) / mean if mean else None
    same = max(map(_low, used)) <= min(map(_high, used))
    text = f"{name}: {_effect_words(same, lowest, highest, spread)}"
    status = "no effect" if same else "effect"
    return BudgetEffect(first.method, first.context, first.gamma, first.setting, status, spread, text)


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
