"""Pure statistics on tables of rows: intervals and verdicts in words. Knows no models, no tensors, no files."""

from bdcore.collapse.cells import Cell
from bdcore.collapse.intervals import MIN_PROMPTS, Estimate, ratio_of_sums
from bdcore.collapse.pairing import difference, quotient
from bdcore.collapse.speedups import SpeedupCollapse, speedup_boundaries
from bdcore.collapse.verdicts import BudgetEffect, Collapse, Headline, budget_effects, collapse_boundaries, headlines

__all__ = [
    "MIN_PROMPTS",
    "BudgetEffect",
    "Cell",
    "Collapse",
    "Estimate",
    "Headline",
    "SpeedupCollapse",
    "budget_effects",
    "collapse_boundaries",
    "difference",
    "headlines",
    "quotient",
    "ratio_of_sums",
    "speedup_boundaries",
]
