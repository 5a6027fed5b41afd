"""How estimates and budgets read in a sentence. A missing interval is always said."""

from bdcore.collapse.intervals import Estimate

FULL_BUDGET = -1


def budget_name(budget: int) -> str:
    """`full` for -1."""
    return "full" if budget == FULL_BUDGET else str(budget)


def budget_order(budget: int) -> tuple[bool, int]:
    """Sort key: the full cache is the largest budget."""
    return budget == FULL_BUDGET, budget


def percent(estimate: Estimate) -> str:
    """`61.0 % (55.2 to 66.1, n = 8)`; says so where there is no interval."""
    return _read(estimate, " %", 100, 1)


def points(estimate: Estimate) -> str:
    """`-3.1 points (-6.0 to -0.4, n = 8)`: a difference of two acceptances."""
    return _read(estimate, " points", 100, 1)


def times(estimate: Estimate) -> str:
    """`0.82x (0.75 to 0.91, n = 8)`."""
    return _read(estimate, "x", 1, 2)


def _read(estimate: Estimate, unit: str, scale: float, digits: int) -> str:
    if estimate.value is None:
        return f"undefined (n = {estimate.n})"
    value = f"{scale * estimate.value:.{digits}f}{unit}"
    if estimate.low is None or estimate.high is None:
        return f"{value} (no interval, n = {estimate.n})"
    return f"{value} ({scale * estimate.low:.{digits}f} to {scale * estimate.high:.{digits}f}, n = {estimate.n})"


def probability(p_value: float) -> str:
    """`p = 0.031`, `p < 0.001`."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
