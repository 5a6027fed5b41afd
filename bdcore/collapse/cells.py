"""A cell of a grid as verdicts see it: what was measured where, and which cells may be compared.

Only cells of one method, one setting and one gamma ever are: acceptance falls with gamma by arithmetic alone, and that
is no collapse.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from bdcore.collapse.intervals import Estimate
from bdcore.collapse.words import budget_name, budget_order


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
    speedup: Estimate | None = None
    """Against `ar` on the same prompts; None where nothing was timed."""


def series(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that draft, by method, setting, budget (full last) and gamma; each group by context."""
    ordered = sorted((c for c in cells if c.gamma > 0), key=lambda c: (*_series(c), c.context))
    return [list(group) for _, group in groupby(ordered, key=_series)]


def _series(cell: Cell) -> tuple[str, str, tuple[bool, int], int]:
    return cell.method, cell.setting, budget_order(cell.budget), cell.gamma


def places(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that draft, by method, setting, gamma and context; each group by budget, full last."""
    ordered = sorted((c for c in cells if c.gamma > 0), key=lambda c: (*_place(c), budget_order(c.budget)))
    return [list(group) for _, group in groupby(ordered, key=_place)]


def _place(cell: Cell) -> tuple[str, str, int, int]:
    return cell.method, cell.setting, cell.gamma, cell.context


def title(cell: Cell, *, budget: bool) -> str:
    """What a sentence is about: `sd_sparse, budget 256, gamma 4`."""
    parts = [cell.method, cell.setting, f"budget {budget_name(cell.budget)}" if budget else "", f"gamma {cell.gamma}"]
    return ", ".join(part for part in parts if part)


def usable(estimate: Estimate, min_prompts: int) -> bool:
    """Whether enough prompts are behind a value to judge it."""
    return estimate.value is not None and estimate.n >= min_prompts
