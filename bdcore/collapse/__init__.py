"""Pure statistics on tables of rows: intervals and verdicts in words. Knows no models, no tensors, no files."""

from bdcore.collapse.intervals import Estimate, ratio_of_sums, ratios_of_sums
from bdcore.collapse.pairing import difference, quotient
from bdcore.collapse.verdicts import (
    MIN_PROMPTS,
    BudgetEffect,
    Cell,
    Collapse,
    Headline,
    budget_effects,
    collapse_boundaries,
    headlines,
)

__all__ = [
    "MIN_PROMPTS",
    "BudgetEffect",
    "Cell",
    "Collapse",
    "Estimate",
    "Headline",
    "budget_effects",
    "collapse_boundaries",
    "difference",
    "headlines",
    "quotient",
    "ratio_of_sums",
    "ratios_of_sums",
]
