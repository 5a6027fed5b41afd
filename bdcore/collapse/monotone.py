"""Does acceptance fall where the budget grows? A drafter that sees more should not accept less.

The budget's effect is compared with the best curve that never falls, its isotonic fit, not with a straight line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy import optimize

from bdcore.collapse.budgets import NO_SPREAD, Budgets, budget_table, p_value
from bdcore.collapse.intervals import LEVEL, MIN_PROMPTS, RESAMPLES, Estimate, Floats
from bdcore.collapse.pairing import Sums, difference
from bdcore.collapse.words import budget_name, points, probability

_isotonic_regression: Callable[..., Any] = optimize.isotonic_regression


@dataclass(frozen=True)
class Monotonicity:
    """Whether acceptance over the budget contradicts that it never falls."""

    status: str
    """`monotone`: no evidence against it; `dip`; `insufficient`."""
    distance: float | None
    """Root mean square of acceptance minus its isotonic fit, over drafted tokens."""
    p_value: float | None
    """How often documents drawn anew lie as far off, if the fit were the truth."""
    n: int
    """Documents that drafted at every budget."""
    lower: int | None
    """The pair of budgets with the largest fall; None where acceptance falls nowhere."""
    upper: int | None
    fall: Estimate | None
    """Acceptance at `upper` minus that at `lower`, paired. The pair is chosen after looking: it reads too strong."""
    sentence: str


def monotonicity(
    by_budget: Mapping[int, Sequence[Sums]],
    *,
    name: str = "",
    level: float = LEVEL,
    min_prompts: int = MIN_PROMPTS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Monotonicity:
    """Test acceptance of one drafter at one context against every curve that never falls with the budget.

    `by_budget`: (accepted, drafted) per document, entry i the same document at every budget; -1 is the largest.
    Distance: to the weighted isotonic fit, weights are drafted tokens. The p-value is a bootstrap over documents, drawn
    with all their budgets and re-centred on the fit. Insufficient: one budget, fewer than `min_prompts` documents, no
    acceptance at all, or documents that differ by the same amount, which leaves chance nothing to do.

    Where the budget has no effect, `dip` is said somewhat more often than `level` promises (docs/verdicts.md).
    """
    table, subject = budget_table(by_budget), f"{name}: " if name else ""

    def insufficient(reason: str) -> Monotonicity:
        text = f"{subject}whether acceptance falls with the budget cannot be judged: {reason}."
        return Monotonicity("insufficient", None, None, table.n, None, None, None, text)

    reason = table.too_little(min_prompts)
    if reason:
        return insufficient(reason)
    acceptance, weights = table.acceptance, table.weights
    off, fit = _distance(acceptance, weights), isotonic(acceptance, weights)
    if off < 1e-12:
        text = f"{subject}acceptance falls nowhere with the budget (n = {table.n})."
        return Monotonicity("monotone", 0.0, 1.0, table.n, None, None, None, text)
    null = table.under(fit, resamples=resamples, seed=seed)
    p = p_value(off, np.array([_distance(column, weights) for column in null.T]))
    if p is None:
        return insufficient(NO_SPREAD)
    lower, upper = _largest_fall(table)
    fall = difference(table.sums(upper), table.sums(lower))
    words = "acceptance falls with the budget" if p < level else "no evidence that acceptance falls with the budget"
    pair = f"from budget {budget_name(lower)} to {budget_name(upper)} it changes by {points(fall)}"
    text = f"{subject}{words} ({probability(p)} against the isotonic fit): {pair}."
    return Monotonicity("dip" if p < level else "monotone", off, p, table.n, lower, upper, fall, text)


def isotonic(acceptance: Floats, weights: Floats) -> Floats:
    """(budgets,): the weighted least-squares fit that never falls."""
    return _isotonic_regression(acceptance, weights=weights, increasing=True).x


def _distance(acceptance: Floats, weights: Floats) -> float:
    return float(np.sqrt(weights @ (acceptance - isotonic(acceptance, weights)) ** 2))


def _largest_fall(table: Budgets) -> tuple[int, int]:
    """The pair of budgets between which acceptance falls most."""
    acceptance = dict(zip(table.names, table.acceptance, strict=True))
    return max(combinations(table.names, 2), key=lambda pair: acceptance[pair[0]] - acceptance[pair[1]])
