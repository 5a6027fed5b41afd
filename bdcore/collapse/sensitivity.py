"""How much acceptance depends on the budget: its range over the budgets relative to its mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bdcore.collapse.budgets import NO_SPREAD, Budgets, budget_table, p_value, ratios
from bdcore.collapse.intervals import LEVEL, MIN_PROMPTS, RESAMPLES, Estimate, Floats, estimate
from bdcore.collapse.pairing import Sums
from bdcore.collapse.words import budget_name, percent, probability


@dataclass(frozen=True)
class Sensitivity:
    """Range over the budgets / mean over the budgets."""

    status: str
    """`sensitive`: equal acceptance at every budget is refuted; `insensitive`: it is not; `insufficient`."""
    spread: Estimate
    p_value: float | None
    """How often documents drawn anew differ as much between budgets, if the budget had no effect."""
    sentence: str


def budget_sensitivity(
    by_budget: Mapping[int, Sequence[Sums]],
    *,
    name: str = "",
    level: float = LEVEL,
    min_prompts: int = MIN_PROMPTS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Sensitivity:
    """Of one drafter at one context; `by_budget` as in `monotonicity`.

    A range is never negative, so it is above 0 also where the budget has no effect: only the p-value tells the two
    apart, not whether the interval reaches 0.
    """
    table, subject = budget_table(by_budget), f"{name}: " if name else ""
    reason = table.too_little(min_prompts)
    if reason:
        return _insufficient(subject, Estimate(None, None, None, table.n), reason)
    spread = _interval(table, resamples, seed)
    flat = np.full(len(table.names), table.weights @ table.acceptance)
    null = np.ptp(table.under(flat, resamples=resamples, seed=seed), axis=0)
    p = p_value(float(np.ptp(table.acceptance)), null)
    if p is None:
        return _insufficient(subject, spread, NO_SPREAD)
    status = "sensitive" if p < level else "insensitive"
    return Sensitivity(status, spread, p, f"{subject}{_words(table, spread, p, level)}.")


def _insufficient(subject: str, spread: Estimate, reason: str) -> Sensitivity:
    text = f"{subject}the effect of the budget cannot be judged: {reason}."
    return Sensitivity("insufficient", spread, None, text)


def range_by_mean(*columns: Floats, axis: int = -1) -> Floats:
    """Columns as `ratios` takes them."""
    found = ratios(*columns, axis=axis)
    return np.ptp(found, axis=0) / found.mean(axis=0)


def _interval(table: Budgets, resamples: int, seed: int) -> Estimate:
    """The basic bootstrap: noise makes a range too large, and that of a resample larger again by about as much.

    BCa and percentile intervals would lie wholly above 0 where the budget has no effect (measured: docs/verdicts.md).
    """
    found = estimate(range_by_mean, table.columns, resamples=resamples, seed=seed, kinds=("basic",))
    return found if found.low is None else replace(found, low=max(0.0, found.low))


def _words(table: Budgets, spread: Estimate, p: float, level: float) -> str:
    ends = [int(i(table.acceptance)) for i in (np.argmin, np.argmax)]
    low, high = (f"{100 * table.acceptance[i]:.1f} % at budget {budget_name(table.names[i])}" for i in ends)
    words = "acceptance depends on the budget" if p < level else "no evidence that acceptance depends on the budget"
    return f"{words} ({probability(p)}): from {low} to {high}, range / mean {percent(spread)}"
