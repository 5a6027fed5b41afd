"""Pure statistics on tables of rows: intervals and verdicts in words. Knows no models, no tensors, no files."""

from bdcore.collapse.attribution import Attribution, Swap, attribute_loss
from bdcore.collapse.breakeven import (
    Agreement,
    BreakEven,
    CostBound,
    Costs,
    agreement,
    best_gamma,
    break_even,
    expected_speedups,
    largest_cost_ratio,
    tokens_per_round,
)
from bdcore.collapse.cells import Cell
from bdcore.collapse.intervals import MIN_PROMPTS, Estimate
from bdcore.collapse.monotone import Monotonicity, monotonicity
from bdcore.collapse.pairing import difference, quotient
from bdcore.collapse.permutation import Permutation, permutation_test
from bdcore.collapse.ratios import ratio_of_sums, ratios_of_sums
from bdcore.collapse.sensitivity import Sensitivity, budget_sensitivity
from bdcore.collapse.speedups import SpeedupCollapse, speedup_boundaries
from bdcore.collapse.survival import Group, by_label
from bdcore.collapse.verdicts import BudgetEffect, Collapse, Headline, budget_effects, collapse_boundaries, headlines

__all__ = [
    "MIN_PROMPTS",
    "Agreement",
    "Attribution",
    "BreakEven",
    "BudgetEffect",
    "Cell",
    "Collapse",
    "CostBound",
    "Costs",
    "Estimate",
    "Group",
    "Headline",
    "Monotonicity",
    "Permutation",
    "Sensitivity",
    "SpeedupCollapse",
    "Swap",
    "agreement",
    "attribute_loss",
    "best_gamma",
    "break_even",
    "budget_effects",
    "budget_sensitivity",
    "by_label",
    "collapse_boundaries",
    "difference",
    "expected_speedups",
    "headlines",
    "largest_cost_ratio",
    "monotonicity",
    "permutation_test",
    "quotient",
    "ratio_of_sums",
    "ratios_of_sums",
    "speedup_boundaries",
    "tokens_per_round",
]
